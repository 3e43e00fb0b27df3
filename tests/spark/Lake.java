import java.io.*;
import java.nio.file.*;
import java.util.*;
import java.util.stream.Stream;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.catalog.*;
import org.apache.spark.sql.connector.read.*;
import org.apache.spark.sql.connector.write.*;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A catalog whose tables know MERGE, for small tables on one machine. A table is a folder below the option
 * <code>folder</code>. Each MERGE writes all of its rows into a new file, which appears in one step: a table is as one
 * MERGE left it, whatever is killed.
 */
public final class Lake implements TableCatalog {
    private static final String ROWS = "rows-";

    private String name;
    private Path folder;

    @Override
    public void initialize(String name, CaseInsensitiveStringMap options) {
        this.name = name;
        folder = Path.of(options.get("folder"));
    }

    @Override
    public String name() {
        return name;
    }

    @Override
    public Identifier[] listTables(String[] namespace) {
        throw new UnsupportedOperationException();
    }

    @Override
    public Table loadTable(Identifier identifier) throws NoSuchTableException {
        Path place = place(identifier);
        if (!Files.exists(place.resolve("table"))) {
            throw new NoSuchTableException(identifier);
        }
        return new MergedTable(identifier.toString(), place, (Meta) read(place.resolve("table")));
    }

    @Override
    public Table createTable(Identifier identifier, TableInfo info) {
        Path place = place(identifier);
        write(place.resolve(ROWS + "000000"), new byte[0][]);
        Meta meta = new Meta(info.schema().json(), new HashMap<>(info.properties()));
        write(place.resolve("table"), meta);
        return new MergedTable(identifier.toString(), place, meta);
    }

    @Override
    public Table alterTable(Identifier identifier, TableChange... changes) throws NoSuchTableException {
        MergedTable table = (MergedTable) loadTable(identifier);
        for (TableChange change : changes) {
            if (!(change instanceof TableChange.SetProperty set)) {
                throw new UnsupportedOperationException(change.toString());
            }
            table.meta.properties.put(set.property(), set.value());
        }
        write(table.place.resolve("table"), table.meta);
        return table;
    }

    @Override
    public boolean dropTable(Identifier identifier) {
        throw new UnsupportedOperationException();
    }

    @Override
    public void renameTable(Identifier before, Identifier after) {
        throw new UnsupportedOperationException();
    }

    private Path place(Identifier identifier) {
        return folder.resolve(String.join("/", identifier.namespace())).resolve(identifier.name());
    }

    private static Object read(Path file) {
        try (ObjectInputStream in = new ObjectInputStream(Files.newInputStream(file))) {
            return in.readObject();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        } catch (ClassNotFoundException error) {
            throw new IllegalStateException(error);
        }
    }

    private static void write(Path file, Object object) {
        try {
            Files.createDirectories(file.getParent());
            Path draft = file.resolveSibling("draft-" + file.getFileName());
            try (ObjectOutputStream out = new ObjectOutputStream(Files.newOutputStream(draft))) {
                out.writeObject(object);
            }
            Files.move(draft, file, StandardCopyOption.ATOMIC_MOVE);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private record Meta(String schema, HashMap<String, String> properties) implements Serializable {}

    private record Rows(byte[][] rows) implements InputPartition, WriterCommitMessage {}

    private record MergedTable(String name, Path place, Meta meta) implements SupportsRead, SupportsRowLevelOperations {
        @Override
        public StructType schema() {
            return (StructType) DataType.fromJson(meta.schema);
        }

        @Override
        public Map<String, String> properties() {
            return meta.properties;
        }

        @Override
        public Set<TableCapability> capabilities() {
            return Set.of(TableCapability.BATCH_READ);
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
            return () -> new TableScan(schema(), newest());
        }

        @Override
        public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
            return () -> new Replacement(this, info.command());
        }

        Path newest() {
            try (Stream<Path> files = Files.list(place)) {
                return files.filter(file -> file.getFileName().toString().startsWith(ROWS)).max(Path::compareTo).get();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    private record TableScan(StructType readSchema, Path file) implements Scan, Batch {
        @Override
        public Batch toBatch() {
            return this;
        }

        @Override
        public InputPartition[] planInputPartitions() {
            return new InputPartition[] {new Rows((byte[][]) read(file))};
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
            int columns = readSchema.size();
            return partition -> new Reader(List.of(((Rows) partition).rows).iterator(), new UnsafeRow(columns));
        }
    }

    private record Reader(Iterator<byte[]> rows, UnsafeRow get) implements PartitionReader<InternalRow> {
        @Override
        public boolean next() {
            if (!rows.hasNext()) {
                return false;
            }
            byte[] bytes = rows.next();
            get.pointTo(bytes, bytes.length);
            return true;
        }

        @Override
        public void close() {}
    }

    /** All rows of the version that was scanned are replaced; a version that another MERGE made since is refused. */
    private static final class Replacement implements RowLevelOperation, Write, BatchWrite {
        private final MergedTable table;
        private final Command command;
        private Path scanned;

        Replacement(MergedTable table, Command command) {
            this.table = table;
            this.command = command;
        }

        @Override
        public Command command() {
            return command;
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
            return () -> new TableScan(table.schema(), scanned = table.newest());
        }

        @Override
        public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
            return new WriteBuilder() {
                @Override
                public Write build() {
                    return Replacement.this;
                }
            };
        }

        @Override
        public String description() {
            return table.name;
        }

        @Override
        public BatchWrite toBatch() {
            return this;
        }

        @Override
        public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
            StructType schema = table.schema();
            return (partition, task) -> new Writer(UnsafeProjection.create(schema), new ArrayList<>());
        }

        @Override
        public void commit(WriterCommitMessage[] messages) {
            if (!scanned.equals(table.newest())) {
                throw new IllegalStateException(table.name + ": another MERGE came after " + scanned);
            }
            Stream<byte[]> rows = Arrays.stream(messages).flatMap(message -> Arrays.stream(((Rows) message).rows));
            int number = Integer.parseInt(scanned.getFileName().toString().substring(ROWS.length()));
            write(table.place.resolve(String.format("%s%06d", ROWS, number + 1)), rows.toArray(byte[][]::new));
        }

        @Override
        public void abort(WriterCommitMessage[] messages) {}
    }

    private record Writer(UnsafeProjection projection, List<byte[]> rows) implements DataWriter<InternalRow> {
        @Override
        public void write(InternalRow row) {
            rows.add(projection.apply(row).getBytes().clone());
        }

        @Override
        public WriterCommitMessage commit() {
            return new Rows(rows.toArray(byte[][]::new));
        }

        @Override
        public void abort() {}

        @Override
        public void close() {}
    }
}
