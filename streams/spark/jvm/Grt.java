package kes.spark;

import java.util.HashMap;
import java.util.HashSet;
import java.util.Locale;
import java.util.Map;
import java.util.Set;

import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.ReportsSinkMetrics;
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
        return new Topics(python.getTable(schema, partitioning, properties), stored(properties), new Commits());
    }

    /**
     * What a catalog keeps of {@code CREATE TABLE ... OPTIONS (...)}: it hands them over among a table's properties,
     * and gives to a read or a write of it only what that statement says itself. Under their prefix, by which
     * options.py tells the ones from the others.
     */
    private static Map<String, String> stored(Map<String, String> properties) {
        Map<String, String> found = new HashMap<>();
        properties.forEach((name, value) -> {
            if (name.startsWith(TableCatalog.OPTION_PREFIX)) found.put(name.toLowerCase(Locale.ROOT), value);
        });
        return found;
    }

    private record Info(LogicalWriteInfo given, CaseInsensitiveStringMap options) implements LogicalWriteInfo {
        @Override public String queryId() {
            return given.queryId();
        }

        @Override public StructType schema() {
            return given.schema();
        }
    }

    private record Topics(Table python, Map<String, String> stored, Commits commits)
        implements SupportsRead, SupportsWrite, ReportsSinkMetrics {
        @Override public String name() {
            return NAME;
        }

        @Override @SuppressWarnings("deprecation") public StructType schema() {
            return python.schema();
        }

        /** Any columns, which the sink checks: those of a table that is read are not those of a row to write. */
        @Override public Set<TableCapability> capabilities() {
            Set<TableCapability> all = new HashSet<>(python.capabilities());
            all.add(TableCapability.ACCEPT_ANY_SCHEMA);
            return all;
        }

        private CaseInsensitiveStringMap with(CaseInsensitiveStringMap given) {
            if (stored.isEmpty()) return given;
            Map<String, String> all = new HashMap<>(stored);
            all.putAll(given);
            return new CaseInsensitiveStringMap(all);
        }

        /** What the progress of a stream calls its sink. */
        @Override public String toString() {
            return NAME;
        }

        @Override public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
            return ((SupportsRead) python).newScanBuilder(with(options));
        }

        @Override public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
            Info all = new Info(info, with(info.options()));
            return new Sink.Builder(all, ((SupportsWrite) python).newWriteBuilder(all), commits);
        }

        /** In the progress of a stream, as {@code sink.metrics}: of its last batch. */
        @Override public Map<String, String> metrics() {
            return commits.metrics();
        }
    }
}
