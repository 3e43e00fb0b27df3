package kes.spark;

import java.util.Map;
import java.util.Set;

import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * {@code format("grt")} where this jar is on the class path: Spark prefers a source in Java to one of the same name in
 * Python. Reads are those of the source in Python, writes are encoded here.
 */
public final class Grt implements TableProvider, DataSourceRegister {
    private static final String NAME = "grt";
    private final PythonDataSourceV2 python = new PythonDataSourceV2();

    public Grt() {
        python.setShortName(NAME);
    }

    @Override public String shortName() {
        return NAME;
    }

    @Override public StructType inferSchema(CaseInsensitiveStringMap options) {
        return python.inferSchema(options);
    }

    @Override public boolean supportsExternalMetadata() {
        return true;
    }

    @Override public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
        return new Topics(python.getTable(schema, partitioning, properties));
    }

    private record Topics(Table python) implements SupportsRead, SupportsWrite {
        @Override public String name() {
            return NAME;
        }

        @Override @SuppressWarnings("deprecation") public StructType schema() {
            return python.schema();
        }

        @Override public Set<TableCapability> capabilities() {
            return python.capabilities();
        }

        /** What the progress of a stream calls its sink. */
        @Override public String toString() {
            return NAME;
        }

        @Override public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
            return ((SupportsRead) python).newScanBuilder(options);
        }

        @Override public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
            return new Sink.Builder(info, ((SupportsWrite) python).newWriteBuilder(info));
        }
    }
}
