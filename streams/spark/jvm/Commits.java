package kes.spark;

import java.util.Map;

import org.apache.spark.sql.connector.write.WriterCommitMessage;

/** What the last commit of a sink was: for people who look at it. Any thread. */
final class Commits {
    private record Last(long rows, long bytes, long batches, long millis) {}

    private volatile Last last;

    /** {@code messages}: Spark's, one of each task. */
    void done(WriterCommitMessage[] messages, long millis) {
        long rows = 0, bytes = 0, batches = 0;
        for (WriterCommitMessage message : messages) {
            if (!(message instanceof Done done)) continue;
            rows += done.rows();
            bytes += done.size();
            batches += done.batches().size();
        }
        last = new Last(rows, bytes, batches, millis);
    }

    long millis() {
        Last found = last;
        return found == null ? 0 : found.millis;
    }

    /** Empty where tasks in Python have written. */
    Map<String, String> metrics() {
        Last found = last;
        return found == null ? Map.of() : Map.of(
            "rows", Long.toString(found.rows), "bytes", Long.toString(found.bytes),
            "recordBatches", Long.toString(found.batches), "commitMs", Long.toString(found.millis));
    }
}
