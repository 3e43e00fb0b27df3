package kes.spark;

import java.io.IOException;
import java.io.InputStream;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.net.URL;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Function;

import com.fasterxml.jackson.databind.JsonNode;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;

/**
 * A write whose tasks stage record batches in this JVM. Options, marker, guards and the transaction are Python's, in
 * the objects of writing/sink.py: {@code Python} plans with them, and gives them the tasks' messages to commit.
 */
public final class Sink {
    private Sink() {}

    record Builder(LogicalWriteInfo info, WriteBuilder python, Commits commits) implements SupportsTruncate {
        @Override public WriteBuilder truncate() {
            return ((SupportsTruncate) python).truncate(); // which says why it cannot be
        }

        @Override public Write build() {
            String chosen = SparkSession.active().conf().get("spark.kes.tasks", "java");
            chosen = info.options().getOrDefault("tasks", info.options().getOrDefault("option.tasks", chosen));
            return "python".equalsIgnoreCase(chosen) ? python.build() : new Writing(info, python, commits);
        }
    }

    /** Planned when Spark says what kind of write it is: once for a batch, and once for each micro-batch. */
    private record Writing(LogicalWriteInfo info, WriteBuilder python, Commits commits) implements Write {
        @Override public BatchWrite toBatch() {
            Plan plan = plan("batch");
            return plan == null ? python.build().toBatch() : new Batch(plan, commits);
        }

        @Override public StreamingWrite toStreaming() {
            Plan plan = plan("stream");
            return plan == null ? python.build().toStreaming() : new Stream(plan, commits);
        }

        @Override public CustomMetric[] supportedCustomMetrics() {
            return new CustomMetric[] {new Bytes(), new Batches(), new CommitTime()};
        }

        /** Of a batch write; a stream's is in its progress, because Spark does not ask its writes. */
        @Override public CustomTaskMetric[] reportDriverMetrics() {
            return new CustomTaskMetric[] {new Count("kesCommit", commits.millis())};
        }

        /** Returns null where Python's half has to do it. */
        private Plan plan(String kind) {
            Map<String, Object> question = new TreeMap<>();
            question.put("do", "plan");
            question.put("kind", kind);
            question.put("options", info.options().asCaseSensitiveMap());
            question.put("schema", info.schema().json());
            question.put("local", SparkSession.active().sparkContext().isLocal());
            question.put("jars", jars());
            question.put("spark", SparkSession.active().version());
            Python.Answer answer = Python.ask(question, List.of());
            JsonNode json = answer.json();
            if (json.has("python")) return null;
            Settings settings = new Settings(
                json.get("topic").textValue(), json.get("codec").asText(), json.get("level").asInt(),
                json.get("record_limit").asInt(), json.get("overhead").asInt(), json.get("batch_limit").asInt());
            Stage.Folder folder = null;
            if (json.get("folder").isArray()) {
                List<String> names = new ArrayList<>();
                json.get("folder").get(1).forEach(name -> names.add(name.asText()));
                folder = new Stage.Folder(json.get("folder").get(0).asText(), names, json.get("folder").get(2).asInt());
            }
            Shape shape = json.get("shape").isArray() ? shape(json.get("shape")) : null;
            return new Plan(
                answer.data(), settings, new Columns(info.schema()), json.get("doing").asText(), folder,
                json.get("threshold").asLong(), json.get("streaming").asBoolean(), json.get("done").asBoolean(), shape);
        }
    }

    /** The jars on the class path that have this source, and of which sources each was built. */
    private static Map<String, String> jars() {
        Map<String, String> found = new TreeMap<>();
        try {
            for (URL url : Collections.list(Sink.class.getClassLoader().getResources("kes/spark/built.txt"))) {
                try (InputStream in = url.openStream()) {
                    found.put(url.toString(), new String(in.readAllBytes(), StandardCharsets.UTF_8).trim());
                }
            }
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        return found;
    }

    private static Shape shape(JsonNode json) {
        return new Shape(json.get(0).asInt(), json.get(1).isNull() ? null : json.get(1).asInt());
    }

    /** {@code writer}: what Python makes the write from. {@code shape}: of the topic, null where rows name their topics. */
    record Plan(
        byte[] writer, Settings settings, Columns columns, String doing, Stage.Folder folder, long threshold,
        boolean streaming, boolean done, Shape shape
    ) implements Serializable, Function<String, Shape> {
        /** The shape of a topic, asked by this JVM's own Python where the driver could not know which. */
        @Override public Shape apply(String topic) {
            if (shape != null) return shape;
            return Sink.shape(Python.ask(Map.of("do", "shape", "topic", topic), List.of(writer)).json().get("shape"));
        }

        void commit(Long batch, WriterCommitMessage[] messages, Commits commits) {
            long began = System.nanoTime();
            answer("commit", batch, messages);
            commits.done(messages, (System.nanoTime() - began) / 1_000_000);
        }

        void abort(Long batch, WriterCommitMessage[] messages) {
            answer("abort", batch, messages);
        }

        private void answer(String what, Long batch, WriterCommitMessage[] messages) {
            List<byte[]> parts = new ArrayList<>(List.of(writer));
            List<Object> described = new ArrayList<>();
            for (WriterCommitMessage message : messages) {
                if (!(message instanceof Done done)) {
                    described.add(null);
                    continue;
                }
                parts.add(done.data() == null ? new byte[0] : done.data());
                Map<String, Object> fields = new TreeMap<>();
                fields.put("rows", done.rows());
                fields.put("size", done.size());
                fields.put("name", done.name());
                fields.put("batches", done.batches());
                fields.put("query", done.query());
                fields.put("batch", done.query() == null ? null : done.batch());
                described.add(fields);
            }
            Map<String, Object> question = new TreeMap<>();
            question.put("do", what);
            question.put("batch", batch);
            question.put("messages", described);
            Python.ask(question, parts);
        }
    }

    private record Batch(Plan plan, Commits commits) implements BatchWrite {
        @Override public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
            return new Factory(plan);
        }

        @Override public void commit(WriterCommitMessage[] messages) {
            plan.commit(null, messages, commits);
        }

        @Override public void abort(WriterCommitMessage[] messages) {
            plan.abort(null, messages);
        }
    }

    private record Stream(Plan plan, Commits commits) implements StreamingWrite {
        @Override public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
            return new Factory(plan);
        }

        @Override public void commit(long batch, WriterCommitMessage[] messages) {
            plan.commit(batch, messages, commits);
        }

        @Override public void abort(long batch, WriterCommitMessage[] messages) {
            plan.abort(batch, messages);
        }
    }

    private record Factory(Plan plan) implements DataWriterFactory, StreamingDataWriterFactory {
        @Override public DataWriter<InternalRow> createWriter(int partition, long task) {
            return new Writer(plan);
        }

        @Override public DataWriter<InternalRow> createWriter(int partition, long task, long epoch) {
            return new Writer(plan);
        }
    }

    /** One task. Nothing of it is visible to readers before the driver's commit. */
    private static final class Writer implements DataWriter<InternalRow> {
        private final Plan plan;
        private final String query;
        private final long batch;
        private final Stage stage;
        private final Encoder encoder;
        private long bytes, batches;

        Writer(Plan plan) {
            this.plan = plan;
            TaskContext context = TaskContext.get();
            query = plan.streaming ? property(context, "sql.streaming.queryId") : null;
            batch = plan.streaming ? Long.parseLong(property(context, "streaming.sql.batchId")) : -1;
            if (plan.streaming && "true".equals(context.getLocalProperty("__is_continuous_processing"))) {
                throw new SinkRefused("ConfigError", "trigger(continuous=...) cannot be exactly once: rows are sent "
                    + "before Spark has noted what an epoch reads; use trigger(processingTime=...) or "
                    + "trigger(availableNow=True)");
            }
            Stage.Folder folder = plan.folder;
            if (folder != null && plan.streaming) folder = folder.in(query, Long.toString(batch));
            stage = new Stage(folder, plan.threshold);
            String doing = plan.streaming ? plan.doing + ", batch " + batch : plan.doing;
            long turn = ThreadLocalRandom.current().nextInt(1 << 30); // tasks begin at different partitions
            encoder = plan.done ? null : new Encoder(
                plan.columns, plan.settings, doing, plan, System::currentTimeMillis, turn, this::take);
        }

        private static String property(TaskContext context, String name) {
            String value = context.getLocalProperty(name);
            if (value != null) return value;
            throw new SinkRefused("StreamsError", "a streaming write outside of a streaming query's task");
        }

        private void take(Encoder.Batch made) {
            stage.take(made);
            bytes += made.bytes().length;
            batches++;
        }

        @Override public void write(InternalRow row) {
            if (encoder != null) encoder.add(row); // else the write was done before: there is nothing to stage
        }

        @Override public WriterCommitMessage commit() {
            if (encoder != null) encoder.finish();
            return stage.finish(encoder == null ? 0 : encoder.rows(), query, batch);
        }

        @Override public void abort() {
            stage.discard();
        }

        @Override public void close() {}

        @Override public CustomTaskMetric[] currentMetricsValues() {
            return new CustomTaskMetric[] {new Count("kesBytes", bytes), new Count("kesBatches", batches)};
        }
    }

    private record Count(String name, long value) implements CustomTaskMetric {}

    /** Shown by Spark's UI, which makes it by its name: so public, as the next one. */
    public static final class Bytes extends CustomSumMetric {
        @Override public String name() {
            return "kesBytes";
        }

        @Override public String description() {
            return "bytes of record batches";
        }
    }

    /** Shown by Spark's UI. */
    public static final class CommitTime extends CustomSumMetric {
        @Override public String name() {
            return "kesCommit";
        }

        @Override public String description() {
            return "milliseconds of the commit";
        }
    }

    /** Shown by Spark's UI. */
    public static final class Batches extends CustomSumMetric {
        @Override public String name() {
            return "kesBatches";
        }

        @Override public String description() {
            return "number of record batches";
        }
    }
}
