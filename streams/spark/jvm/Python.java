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
 * A request: [number: long][parts: int]([size: long][bytes] each); the first part is JSON. An answer: [number: long],
 * then its two parts in the same way; number 0, with nothing behind it, is a sign of life. A process that is frozen
 * gives none. It is killed, for another one to take its place: what it left open is ended by the fence of the next
 * commit, and whether it had committed, the marker tells.
 */
final class Python {
    /** An answer: JSON, and bytes to be given back later. */
    record Answer(JsonNode json, byte[] data) {}

    static final ObjectMapper JSON = new ObjectMapper();
    private static final Logger LOG = LoggerFactory.getLogger(Python.class);
    private static final long DYING_SECONDS = 10;
    private static final long NOTED_SECONDS = 60;
    private static final String TIMEOUT = "spark.kes.committer.timeout";
    private static Python running;

    static { // one that is frozen would not see that its input ends
        Runtime.getRuntime().addShutdownHook(new Thread(Python::killed));
    }

    private final Process process;
    private final String program;
    private final long limit = Math.max(10, SparkEnv.get().conf().getTimeAsSeconds(TIMEOUT, "60s"));
    private final DataOutputStream out;
    private final Map<Long, CompletableFuture<Answer>> waiting = new ConcurrentHashMap<>();
    private final AtomicLong numbers = new AtomicLong();
    private final CompletableFuture<String> ended = new CompletableFuture<>();
    private volatile long beats;
    private volatile String fate;

    private Python() throws IOException {
        program = program();
        ProcessBuilder builder = new ProcessBuilder(program, "-m", "streams.spark.jvm.committing");
        String paths = Stream.of(System.getenv("PYTHONPATH"), PythonUtils.sparkPythonPath())
            .filter(path -> path != null && !path.isEmpty()).collect(Collectors.joining(File.pathSeparator));
        builder.environment().put("PYTHONPATH", paths);
        process = builder.redirectError(ProcessBuilder.Redirect.INHERIT).start();
        out = new DataOutputStream(new BufferedOutputStream(process.getOutputStream(), 1 << 16));
        for (Runnable work : List.<Runnable>of(this::read, this::watch)) {
            Thread thread = new Thread(work, "kes-committer");
            thread.setDaemon(true);
            thread.start();
        }
    }

    /** Spark's choice of a Python for its driver, or its executors. */
    private static String program() {
        SparkConf conf = SparkEnv.get().conf();
        String plain = System.getenv().getOrDefault("PYSPARK_PYTHON", PythonUtils$.MODULE$.defaultPythonExec());
        String both = conf.get("spark.pyspark.python", plain);
        return "driver".equals(SparkEnv.get().executorId()) ? conf.get("spark.pyspark.driver.python", both) : both;
    }

    private static synchronized Python started() throws IOException {
        if (running == null || running.ended.isDone()) running = new Python();
        return running;
    }

    private static void killed() {
        Python last = running;
        if (last != null) last.process.destroyForcibly();
    }

    /** Asks, and waits for the answer. Raises {@code SinkRefused} for what Python raises, and where it dies. */
    static Answer ask(Object question, List<byte[]> parts) {
        Python python = null;
        try {
            python = started();
            return python.answer(JSON.writeValueAsBytes(question), parts);
        } catch (IOException error) {
            String why = python == null ? error.toString() : python.ended.completeOnTimeout(
                error.toString(), 2 * DYING_SECONDS, TimeUnit.SECONDS).join();
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
            if (ended.isDone()) throw new IOException(ended.join()); // it may have ended before this one waited
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
                beats++;
                if (number == 0) continue;
                JsonNode json = JSON.readTree(in.readNBytes((int) in.readLong()));
                byte[] data = in.readNBytes((int) in.readLong());
                CompletableFuture<Answer> answer = waiting.get(number);
                if (answer != null) answer.complete(new Answer(json, data));
            }
        } catch (IOException | RuntimeException error) {
            process.destroy();
            String code = "killed";
            try {
                if (process.waitFor(DYING_SECONDS, TimeUnit.SECONDS)) code = "exit code " + process.exitValue();
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
            ended.complete(program + ", process " + process.pid() + ", " + (fate == null ? code : fate));
            waiting.values().forEach(answer -> answer.completeExceptionally(error));
        }
    }

    /**
     * Kills the process when it gives no sign of life while something waits for it. In steps of a second, each of which
     * counts once however long it took, so that a JVM that stood still itself does not take the process for frozen.
     */
    private void watch() {
        long heard = -1, silent = 0;
        try {
            while (!ended.isDone()) {
                Thread.sleep(1000);
                silent = waiting.isEmpty() || heard != beats ? 0 : silent + 1;
                heard = beats;
                if (silent < limit) continue;
                fate = "killed: it gave no sign of life for " + limit + " s (" + TIMEOUT + "), as one that is frozen";
                LOG.error("process {} that commits writes was {}", process.pid(), fate);
                process.destroyForcibly();
                return;
            }
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }
}
