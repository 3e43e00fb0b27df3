package kes.spark;

import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.File;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Collectors;
import java.util.stream.Stream;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.spark.SparkConf;
import org.apache.spark.SparkEnv;
import org.apache.spark.api.python.PythonUtils;
import org.apache.spark.api.python.PythonUtils$;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The one Python process of this JVM that plans and commits writes (committing.py): started when it is first
 * asked something, kept, begun anew when it has died. Any thread. It ends when its input does, so with this JVM.
 *
 * Both ways: [number: long][parts: int]([size: long][bytes] each); the first part is JSON.
 */
final class Python {
    /** An answer: JSON, and bytes to be given back later. */
    record Answer(JsonNode json, byte[] data) {}

    static final ObjectMapper JSON = new ObjectMapper();
    private static final Logger LOG = LoggerFactory.getLogger(Python.class);
    private static final long NOTED_SECONDS = 60;
    private static Python running;

    private final Process process;
    private final String program;
    private final DataOutputStream out;
    private final Map<Long, CompletableFuture<Answer>> waiting = new ConcurrentHashMap<>();
    private final AtomicLong numbers = new AtomicLong();
    private volatile String ended;

    private Python() throws IOException {
        program = program();
        ProcessBuilder builder = new ProcessBuilder(program, "-m", "streams.spark.jvm.committing");
        String paths = Stream.of(System.getenv("PYTHONPATH"), PythonUtils.sparkPythonPath())
            .filter(path -> path != null && !path.isEmpty()).collect(Collectors.joining(File.pathSeparator));
        builder.environment().put("PYTHONPATH", paths);
        process = builder.redirectError(ProcessBuilder.Redirect.INHERIT).start();
        out = new DataOutputStream(new BufferedOutputStream(process.getOutputStream(), 1 << 16));
        Thread reader = new Thread(this::read, "kes-committer");
        reader.setDaemon(true);
        reader.start();
    }

    /** Spark's choice of a Python for its driver, or its executors. */
    private static String program() {
        SparkConf conf = SparkEnv.get().conf();
        String plain = System.getenv().getOrDefault("PYSPARK_PYTHON", PythonUtils$.MODULE$.defaultPythonExec());
        String both = conf.get("spark.pyspark.python", plain);
        return "driver".equals(SparkEnv.get().executorId()) ? conf.get("spark.pyspark.driver.python", both) : both;
    }

    private static synchronized Python started() throws IOException {
        if (running == null || running.ended != null) running = new Python();
        return running;
    }

    /** Asks, and waits for the answer. Raises {@code SinkRefused} for what Python raises, and where it dies. */
    static Answer ask(Object question, List<byte[]> parts) {
        Python python = null;
        try {
            python = started();
            return python.answer(JSON.writeValueAsBytes(question), parts);
        } catch (IOException error) {
            String why = python == null || python.ended == null ? error.toString() : python.ended;
            throw new SinkRefused("StreamsError", "the Python process that plans and commits writes is gone (" + why
                + "; its last words are in the driver's log). Whether what it was doing was committed, the marker "
                + "tells: run it again, or give the option tasks=python");
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
            // Spark takes this for the end of a query that was stopped, and no failure.
            throw new UncheckedIOException(new InterruptedIOException("stopped while Python commits a write"));
        }
    }

    private Answer answer(byte[] question, List<byte[]> parts) throws IOException, InterruptedException {
        long number = numbers.incrementAndGet();
        CompletableFuture<Answer> answer = new CompletableFuture<>();
        waiting.put(number, answer);
        try {
            if (ended != null) throw new IOException(ended); // it may have ended before this one waited
            synchronized (out) {
                out.writeLong(number);
                out.writeInt(1 + parts.size());
                part(question);
                for (byte[] data : parts) part(data);
                out.flush();
            }
            for (long seconds = NOTED_SECONDS;; seconds += NOTED_SECONDS) {
                try {
                    return checked(answer.get(NOTED_SECONDS, TimeUnit.SECONDS));
                } catch (TimeoutException notYet) {
                    LOG.warn("process {} that commits writes has not answered for {} s", process.pid(), seconds);
                } catch (ExecutionException error) {
                    throw new IOException(error.getCause());
                }
            }
        } finally {
            waiting.remove(number);
        }
    }

    private void part(byte[] data) throws IOException {
        out.writeLong(data.length);
        out.write(data);
    }

    private static Answer checked(Answer answer) {
        JsonNode error = answer.json.get("error");
        if (error != null) throw new SinkRefused(error.get(0).asText(), error.get(1).asText());
        return answer;
    }

    private void read() {
        try (DataInputStream in = new DataInputStream(process.getInputStream())) {
            while (true) {
                long number = in.readLong();
                JsonNode json = JSON.readTree(in.readNBytes((int) in.readLong()));
                byte[] data = in.readNBytes((int) in.readLong());
                CompletableFuture<Answer> answer = waiting.get(number);
                if (answer != null) answer.complete(new Answer(json, data));
            }
        } catch (IOException | RuntimeException error) {
            process.destroy();
            String code = "killed";
            try {
                if (process.waitFor(10, TimeUnit.SECONDS)) code = "exit code " + process.exitValue();
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
            ended = program + ", process " + process.pid() + ", " + code;
            waiting.values().forEach(answer -> answer.completeExceptionally(error));
        }
    }
}
