import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import com.fasterxml.jackson.databind.ObjectWriter;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.Serializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;

/**
 * The account workload in Kafka Streams, exactly_once_v2: one processor, one store in memory with a changelog. The
 * first argument is the job as JSON; its options are listed in benchmarks/peers/kafka_streams.py. Ends in an orderly way
 * on SIGTERM, and at once when its standard input ends.
 */
public final class Accounts {
    private static final String TYPE = "__grt__";
    private static final String STORE = "accounts";
    private static final ObjectMapper MAPPER =
            new ObjectMapper().disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES);

    /** The input. */
    public static final class Deposited {
        public String account;
        public long cents;
        public double sent;
        public String note;
    }

    /** The output. */
    public static final class Balance {
        public String account;
        public long count;
        public long cents;
        public double sent;
    }

    /** A key's state. */
    public static final class Account {
        public long count;
        public long cents;
    }

    /** JSON of one class, both ways, by a reader and a writer that are made once. */
    private static final class Json<T> implements Serializer<T>, Deserializer<T> {
        private final ObjectReader reader;
        private final ObjectWriter writer;

        Json(Class<T> kind) {
            reader = MAPPER.readerFor(kind);
            writer = MAPPER.writerFor(kind);
        }

        @Override
        public byte[] serialize(String topic, T value) {
            try {
                return value == null ? null : writer.writeValueAsBytes(value);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        @Override
        public T deserialize(String topic, byte[] bytes) {
            try {
                return bytes == null ? null : reader.readValue(bytes);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        Serde<T> serde() {
            return Serdes.serdeFrom(this, this);
        }

        @Override
        public void configure(Map<String, ?> settings, boolean isKey) {}

        @Override
        public void close() {}
    }

    /** The handler: values are bytes here, because what they are depends on the header. */
    private static final class Handler implements Processor<String, byte[], String, byte[]> {
        private static final byte[] BALANCE = "Balance".getBytes(StandardCharsets.UTF_8);
        private final Json<Deposited> deposits = new Json<>(Deposited.class);
        private final Json<Balance> balances = new Json<>(Balance.class);
        private ProcessorContext<String, byte[]> context;
        private KeyValueStore<String, Account> accounts;

        @Override
        public void init(ProcessorContext<String, byte[]> context) {
            this.context = context;
            this.accounts = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<String, byte[]> record) {
            Header kind = record.headers().lastHeader(TYPE);
            String name = kind == null ? "" : new String(kind.value(), StandardCharsets.UTF_8);
            if (!name.equals("Deposited")) {
                throw new IllegalStateException("an event of type '" + name + "'");
            }
            Deposited event = deposits.deserialize(null, record.value());
            Account account = accounts.get(event.account);
            if (account == null) {
                account = new Account();
            }
            account.count += 1;
            account.cents += event.cents;
            accounts.put(event.account, account);
            Balance balance = new Balance();
            balance.account = event.account;
            balance.count = account.count;
            balance.cents = account.cents;
            balance.sent = event.sent;
            RecordHeaders headers = new RecordHeaders();
            headers.add(TYPE, BALANCE);
            byte[] value = balances.serialize(null, balance);
            context.forward(new Record<>(event.account, value, record.timestamp(), headers));
        }
    }

    private static Topology topology(String source, String output, boolean cached) {
        StoreBuilder<KeyValueStore<String, Account>> store = Stores.keyValueStoreBuilder(
                        Stores.inMemoryKeyValueStore(STORE), Serdes.String(), new Json<>(Account.class).serde())
                .withLoggingEnabled(Map.of());
        return new Topology()
                .addSource("deposits", new StringDeserializer(), new ByteArrayDeserializer(), source)
                .addProcessor("handler", Handler::new, "deposits")
                .addStateStore(cached ? store.withCachingEnabled() : store.withCachingDisabled(), "handler")
                .addSink("balances", output, new StringSerializer(), new ByteArraySerializer(), "handler");
    }

    private static Properties settings(JsonNode job) {
        Map<String, String> options = MAPPER.convertValue(job.get("options"), MAPPER.getTypeFactory()
                .constructMapType(Map.class, String.class, String.class));
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, job.get("group").asText());
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, job.get("bootstrap_servers").asText());
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, options.getOrDefault("threads", "2"));
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, options.getOrDefault("commit_ms", "100"));
        settings.put(StreamsConfig.STATE_DIR_CONFIG, System.getenv("BENCH_SCRATCH"));
        settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, cacheBytes(options));
        settings.put(StreamsConfig.ENABLE_METRICS_PUSH_CONFIG, "false");
        if (options.containsKey("session_ms")) {
            int session = Integer.parseInt(options.get("session_ms"));
            settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG), session);
            settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG), session / 3);
        }
        options.forEach((name, value) -> {
            if (name.startsWith("streams.")) {
                settings.put(name.substring("streams.".length()), value);
            }
        });
        return settings;
    }

    private static String cacheBytes(Map<String, String> options) {
        return Long.toString(Long.parseLong(options.getOrDefault("cache_mb", "64")) << 20);
    }

    private static void endWithParent() {
        try {
            while (System.in.read() >= 0) {
                // nothing is ever said
            }
        } catch (IOException gone) {
            // as good as an end
        }
        Runtime.getRuntime().halt(3);
    }

    public static void main(String[] arguments) throws Exception {
        JsonNode job = MAPPER.readTree(arguments[0]);
        Thread watcher = new Thread(Accounts::endWithParent, "parent");
        watcher.setDaemon(true);
        watcher.start();
        Properties settings = settings(job);
        boolean cached = !"0".equals(settings.getProperty(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG));
        Topology topology = topology(job.get("source").asText(), job.get("output").asText(), cached);
        KafkaStreams streams = new KafkaStreams(topology, settings);
        CountDownLatch failed = new CountDownLatch(1);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            failed.countDown();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(15))));
        streams.start();
        failed.await();
        Runtime.getRuntime().halt(1);
    }

    private Accounts() {}
}
