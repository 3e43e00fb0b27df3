import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Speaks most of what a client of Kafka says, once. Arguments: brokers, group protocol (`-`: none can be chosen). */
public final class JavaClient {
    private static final String TOPIC = "orders";
    private static final String GROUP = "shop";

    private JavaClient() {}

    public static void main(String[] arguments) throws Exception {
        Properties common = new Properties();
        common.put("bootstrap.servers", arguments[0]);
        try (Admin admin = Admin.create(common)) {
            NewTopic topic = new NewTopic(TOPIC, 2, (short) 1);
            topic.configs(Map.of("cleanup.policy", "compact,delete", "min.insync.replicas", "1"));
            done(admin.createTopics(List.of(topic)).all());
            produce(common, 20);
            consume(common, arguments[1], admin);
            ask(admin);
        }
    }

    private static void produce(Properties common, int count) {
        Properties settings = new Properties();
        settings.putAll(common);
        settings.put("transactional.id", "shop-producer");
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            producer.initTransactions();
            producer.beginTransaction();
            for (int number = 0; number < count; number++) {
                byte[] key = ("key-" + number).getBytes();
                producer.send(new ProducerRecord<>(TOPIC, number % 2, key, new byte[number]));
            }
            producer.abortTransaction();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(TOPIC, 0, "käse".getBytes(), null));
            producer.commitTransaction();
        }
    }

    private static void consume(Properties common, String protocol, Admin admin) throws Exception {
        Properties settings = new Properties();
        settings.putAll(common);
        settings.put("group.id", GROUP);
        settings.put("auto.offset.reset", "earliest");
        settings.put("isolation.level", "read_committed");
        settings.put("heartbeat.interval.ms", "100");
        settings.put("enable.auto.commit", "false");
        if (!protocol.equals("-")) {
            settings.put("group.protocol", protocol);
        }
        if (protocol.equals("consumer")) {
            settings.remove("heartbeat.interval.ms");
        }
        Properties writing = new Properties();
        writing.putAll(common);
        writing.put("transactional.id", "shop-offsets");
        try (KafkaConsumer<byte[], byte[]> consumer =
                        new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
                KafkaProducer<byte[], byte[]> producer =
                        new KafkaProducer<>(writing, new ByteArraySerializer(), new ByteArraySerializer())) {
            consumer.subscribe(List.of(TOPIC));
            long end = System.nanoTime() + Duration.ofSeconds(60).toNanos();
            int seen = 0;
            while (seen == 0 && System.nanoTime() < end) {
                seen += consumer.poll(Duration.ofMillis(500)).count();
            }
            consumer.commitSync();
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            for (TopicPartition partition : consumer.assignment()) {
                offsets.put(partition, new OffsetAndMetadata(consumer.position(partition), "a note"));
            }
            producer.initTransactions();
            producer.beginTransaction();
            producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
            done(admin.listTransactions().all());
            done(admin.describeTransactions(List.of("shop-offsets", "nobody")).all());
            producer.commitTransaction();
            consumer.committed(consumer.assignment());
            done(admin.describeConsumerGroups(List.of(GROUP)).all());
            done(admin.listConsumerGroups().all());
        }
    }

    private static void ask(Admin admin) throws Exception {
        TopicPartition first = new TopicPartition(TOPIC, 0);
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, TOPIC);
        done(admin.describeCluster().nodes());
        done(admin.describeConfigs(List.of(topic)).all());
        done(admin.createPartitions(Map.of(TOPIC, NewPartitions.increaseTo(3))).all());
        done(admin.listOffsets(Map.of(first, OffsetSpec.latest())).all());
        done(admin.describeProducers(List.of(first)).all());
        done(admin.listConsumerGroupOffsets(GROUP).partitionsToOffsetAndMetadata());
        done(admin.deleteRecords(Map.of(first, RecordsToDelete.beforeOffset(3))).all());
        List<Integer> nodes = new ArrayList<>(Collections.singleton(1));
        done(admin.describeLogDirs(nodes).allDescriptions());
        done(admin.deleteConsumerGroupOffsets(GROUP, Collections.singleton(first)).all());
        done(admin.deleteConsumerGroups(List.of(GROUP)).all());
        done(admin.deleteTopics(List.of(TOPIC)).all());
    }

    /** Wait for an answer; a refusal is one, too. */
    private static void done(KafkaFuture<?> asked) throws InterruptedException {
        try {
            asked.get();
        } catch (ExecutionException refused) {
            System.err.println(refused.getCause());
        }
    }
}
