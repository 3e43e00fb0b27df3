package kes.spark;

import java.io.Serializable;
import java.util.List;

import org.apache.spark.sql.connector.write.WriterCommitMessage;

/**
 * The result of one task for the driver, as writing/staging.py has it: batches one after the other in {@code data}, or
 * in the file {@code name}. {@code query} is null outside of a streaming query.
 */
record Done(long rows, long size, byte[] data, String name, List<Batch> batches, String query, long batch)
    implements WriterCommitMessage {
    record Batch(String topic, int partition, int partitions, int size, long checksum) implements Serializable {}
}
