package kes.spark;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import java.util.function.LongSupplier;
import java.util.zip.CRC32C;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Encodes the rows of one task as Kafka's record batches (format 2) without a producer. The same bytes, in the same
 * order, as writing/batch_encoding.py: a change here is one there, and tests/spark/test_jvm_encoding.py compares them.
 */
public final class Encoder {
    /** Takes the batches, in the order in which they can be sent. */
    public interface Target {
        void take(Batch batch);
    }

    /** One made batch: {@code checksum} is CRC-32C of all its bytes. */
    public record Batch(String topic, int partition, int partitions, byte[] bytes, long checksum) {}

    private static final byte[] TYPE = "__grt__".getBytes(StandardCharsets.UTF_8);
    private static final byte[] VERSION = "__grv__".getBytes(StandardCharsets.UTF_8);
    private static final long GATHERED_BYTES = 16 << 20;
    private static final int KEYLESS_RUN = 1_000;
    private static final int BATCH_HEAD = 61;
    private static final int TRANSACTIONAL = 0x10;
    /** Bytes around key, value and headers of a record, at most. */
    private static final int LENGTHS = 5 + 1 + 10 + 4 + 5 + 5;

    private final Columns at;
    private final Settings settings;
    private final String doing;
    private final Function<String, Shape> shapeOf;
    private final LongSupplier clock;
    private final Target target;
    private final Codec codec;
    private final Map<UTF8String, Topic> topics = new HashMap<>();
    private final Topic only;
    private final List<Made> made = new ArrayList<>();
    private long keyless, rows, gathered, now = -1;
    private int topicsSeen;

    /** {@code keyless}: whose turn it is, of the rows without a key. */
    public Encoder(
        Columns at, Settings settings, String doing, Function<String, Shape> shapeOf, LongSupplier clock, long keyless,
        Target target
    ) {
        this.at = at;
        this.settings = settings;
        this.doing = doing;
        this.shapeOf = shapeOf;
        this.clock = clock;
        this.target = target;
        this.keyless = keyless * KEYLESS_RUN;
        codec = Codec.of(settings.codec(), settings.level());
        only = settings.topic() == null ? null : new Topic(settings.topic(), shapeOf.apply(settings.topic()));
    }

    public long rows() {
        return rows;
    }

    /** Raises {@code SinkRefused} for a row that cannot be a record. */
    public void add(InternalRow row) {
        byte[] key = at.bytes(row, Columns.KEY), value = at.bytes(row, Columns.VALUE);
        long time = time(row);
        byte[] headers = headers(row);
        Topic topic = topic(row);
        int partition = partition(row, key, topic);
        int size = (key == null ? 0 : key.length) + (value == null ? 0 : value.length) + headers.length;
        // What remains of a record's overhead, the number of its headers counted already.
        if (size > settings.recordLimit() - settings.overhead()) {
            throw tooLarge(topic, partition, key, "the record has " + (size + settings.overhead())
                + " bytes, and kafka.message.max.bytes is " + settings.recordLimit());
        }
        Open batch = topic.open[partition];
        if (batch == null) batch = topic.open[partition] = new Open();
        if (batch.count > 0 && batch.most + size + LENGTHS > topic.limit - BATCH_HEAD) close(topic, partition);
        batch.add(key, value, headers, time, size);
        rows++;
        gathered += size + LENGTHS;
        if (gathered >= GATHERED_BYTES) flush();
    }

    /** Makes batches of what is left. */
    public void finish() {
        flush();
    }

    private void flush() {
        for (Topic topic : only != null ? List.of(only) : topics.values()) {
            for (int partition = 0; partition < topic.open.length; partition++) close(topic, partition);
            Arrays.fill(topic.depth, 0);
        }
        made.sort(ORDER);
        for (Made one : made) target.take(one.batch);
        made.clear();
        for (Topic topic : topics.values()) topic.number = -1;
        topicsSeen = 0;
        gathered = 0;
        now = -1;
    }

    // -- what a row says ----------------------------------------------------------------------------------------------

    private long time(InternalRow row) {
        if (now < 0) now = clock.getAsLong();
        int column = at.of(Columns.TIMESTAMP);
        if (column < 0 || row.isNullAt(column)) return now;
        long micros = row.getLong(column);
        if (micros < 1000) {
            throw new SinkRefused("RecordRefused", doing + ": a row's column timestamp is 1970-01-01T00:00:00.000 or "
                + "earlier, which Kafka cannot keep; null means the time of sending. Nothing was written");
        }
        return micros / 1000;
    }

    private Topic topic(InternalRow row) {
        if (only != null) return only;
        int column = at.of(Columns.TOPIC);
        if (row.isNullAt(column)) {
            throw new SinkRefused("RecordRefused", doing + ": a row has null in its column topic; nothing was written");
        }
        UTF8String name = row.getUTF8String(column);
        Topic topic = topics.get(name);
        if (topic == null) {
            topic = new Topic(name.toString(), shapeOf.apply(name.toString()));
            topics.put(name.copy(), topic);
        }
        if (topic.number < 0) topic.number = topicsSeen++;
        return topic;
    }

    private int partition(InternalRow row, byte[] key, Topic topic) {
        int count = topic.open.length;
        long turn = key == null ? ++keyless / KEYLESS_RUN : 0;
        Long own = at.number(row, Columns.PARTITION);
        if (own == null) return key == null ? (int) (turn % count) : (murmur2(key) & 0x7fffffff) % count;
        if (own < 0 || own >= count) {
            throw new SinkRefused("RecordRefused", doing + ": a row names partition " + own + " of '" + topic.name
                + "', which has " + count + "; drop the column partition to let the key decide. Nothing was written");
        }
        return own.intValue();
    }

    /** The end of a record: its headers; the columns type and version win over headers of the same meaning. */
    private byte[] headers(InternalRow row) {
        byte[] type = at.bytes(row, Columns.TYPE);
        Long version = type == null ? null : at.number(row, Columns.VERSION);
        int column = at.of(Columns.HEADERS);
        ArrayData own = column < 0 || row.isNullAt(column) ? null : row.getArray(column);
        if (type == null && own == null) return NONE;
        Bytes out = new Bytes(64);
        int count = (type == null ? 0 : 1) + (version == null || version == 1 ? 0 : 1);
        boolean[] kept = new boolean[own == null ? 0 : own.numElements()];
        for (int i = 0; i < kept.length; i++) {
            InternalRow header = own.isNullAt(i) ? null : own.getStruct(i, 2);
            if (header == null || header.isNullAt(0)) {
                throw new SinkRefused("RecordRefused", doing + ": a row's column headers has a header that is null, or "
                    + "whose key is; nothing was written");
            }
            byte[] name = header.getUTF8String(0).getBytes();
            boolean isType = type != null && Arrays.equals(name, TYPE);
            kept[i] = !isType && !(version != null && Arrays.equals(name, VERSION));
            if (kept[i]) count++;
        }
        out.number(count);
        if (type != null) {
            out.field(TYPE);
            out.field(type);
        }
        if (version != null && version != 1) {
            out.field(VERSION);
            out.field(version.toString().getBytes(StandardCharsets.UTF_8));
        }
        for (int i = 0; i < kept.length; i++) {
            if (!kept[i]) continue;
            InternalRow header = own.getStruct(i, 2);
            out.field(header.getUTF8String(0).getBytes());
            out.field(header.isNullAt(1) ? null : header.getBinary(1));
        }
        return Arrays.copyOf(out.data, out.at);
    }

    private static final byte[] NONE = {0};

    // -- batches ------------------------------------------------------------------------------------------------------

    private void close(Topic topic, int partition) {
        Open batch = topic.open[partition];
        if (batch == null || batch.count == 0) return;
        byte[] body = batch.records.data;
        int size = batch.records.at, attributes = TRANSACTIONAL;
        byte[] packed = codec.compress(body, size);
        if (packed != null && packed.length < size) {
            body = packed;
            size = packed.length;
            attributes |= codec.attribute();
        }
        if (batch.count == 1 && topic.shape.batchBytes() != null && BATCH_HEAD + size > topic.shape.batchBytes()) {
            throw tooLarge(topic, partition, batch.firstKey, "the record makes a batch of " + (BATCH_HEAD + size)
                + " bytes, and the topic takes " + topic.shape.batchBytes() + " (max.message.bytes)");
        }
        ByteBuffer out = ByteBuffer.allocate(BATCH_HEAD + size);
        out.putLong(0).putInt(BATCH_HEAD - 12 + size).putInt(-1).put((byte) 2).putInt(0);
        out.putShort((short) attributes).putInt(batch.count - 1).putLong(batch.first).putLong(batch.last);
        out.putLong(-1).putShort((short) -1).putInt(-1).putInt(batch.count);
        out.put(body, 0, size);
        CRC32C checksum = new CRC32C();
        checksum.update(out.array(), 21, out.capacity() - 21);
        out.putInt(17, (int) checksum.getValue());
        checksum.reset();
        checksum.update(out.array(), 0, out.capacity());
        Batch one = new Batch(topic.name, partition, topic.open.length, out.array(), checksum.getValue());
        made.add(new Made(topic.depth[partition]++, Math.max(topic.number, 0), one));
        batch.reset();
    }

    private SinkRefused tooLarge(Topic topic, int partition, byte[] key, String reason) {
        return new SinkRefused("RecordRefused", doing + ": " + topic.name + "[" + partition + "], key " + shown(key)
            + ": " + reason + ". Nothing was written");
    }

    /** A key in a message, as Python shows bytes. */
    static String shown(byte[] key) {
        if (key == null) return "null";
        boolean quoted = false, doubled = false;
        int most = Math.min(key.length, 40);
        for (int i = 0; i < most; i++) {
            quoted |= key[i] == '\'';
            doubled |= key[i] == '"';
        }
        char quote = quoted && !doubled ? '"' : '\'';
        StringBuilder text = new StringBuilder("b").append(quote);
        for (int i = 0; i < most; i++) {
            int b = key[i] & 0xff;
            if (b == quote || b == '\\') text.append('\\').append((char) b);
            else if (b == '\n') text.append("\\n");
            else if (b == '\r') text.append("\\r");
            else if (b == '\t') text.append("\\t");
            else if (b < 32 || b > 126) text.append(String.format("\\x%02x", b));
            else text.append((char) b);
        }
        text.append(quote);
        return key.length <= 40 ? text.toString() : text + "... (" + key.length + " bytes)";
    }

    static int murmur2(byte[] data) {
        int length = data.length, m = 0x5bd1e995, h = 0x9747b28c ^ length;
        int tail = length & ~3;
        for (int j = 0; j < tail; j += 4) {
            int k = data[j] & 0xff | (data[j + 1] & 0xff) << 8 | (data[j + 2] & 0xff) << 16;
            k |= (data[j + 3] & 0xff) << 24;
            k *= m;
            k ^= k >>> 24;
            k *= m;
            h *= m;
            h ^= k;
        }
        int rest = length & 3;
        if (rest == 3) h ^= (data[tail + 2] & 0xff) << 16;
        if (rest >= 2) h ^= (data[tail + 1] & 0xff) << 8;
        if (rest >= 1) {
            h ^= data[tail] & 0xff;
            h *= m;
        }
        h ^= h >>> 13;
        h *= m;
        return h ^ h >>> 15;
    }

    private record Made(int depth, int topic, Batch batch) {}

    /** The first batch of each partition, then the second. */
    private static final Comparator<Made> ORDER = Comparator.comparingInt(Made::depth)
        .thenComparingInt(Made::topic).thenComparingInt(made -> made.batch.partition);

    private final class Topic {
        final String name;
        final Shape shape;
        final Open[] open;
        /** How many batches each partition has in what is gathered. */
        final int[] depth;
        final int limit;
        /** By its first row in what is gathered; -1: it has none. */
        int number = -1;

        Topic(String name, Shape shape) {
            this.name = name;
            this.shape = shape;
            open = new Open[shape.partitions()];
            depth = new int[shape.partitions()];
            limit = shape.batchBytes() == null
                ? settings.batchLimit() : Math.min(settings.batchLimit(), shape.batchBytes());
        }
    }

    private static final class Open {
        final Bytes records = new Bytes(1 << 10);
        int count;
        long most, first, last;
        byte[] firstKey;

        void reset() {
            records.at = count = 0;
            most = 0;
            firstKey = null;
        }

        void add(byte[] key, byte[] value, byte[] headers, long time, int size) {
            if (count == 0) {
                first = last = time;
                firstKey = key;
            }
            last = Math.max(last, time);
            most += size + LENGTHS;
            int length = 1 + Bytes.width(time - first) + Bytes.width(count) + Bytes.width(key) + Bytes.width(value);
            records.number(length + headers.length);
            records.need(length + headers.length);
            records.data[records.at++] = 0;
            records.number(time - first);
            records.number(count++);
            records.field(key);
            records.field(value);
            records.put(headers);
        }
    }

    /** Bytes that grow. */
    private static final class Bytes {
        byte[] data;
        int at;

        Bytes(int size) {
            data = new byte[size];
        }

        void need(int more) {
            if (at + more > data.length) data = Arrays.copyOf(data, Math.max(data.length * 2, at + more));
        }

        void number(long number) {
            need(10);
            long left = number << 1 ^ number >> 63;
            while ((left & ~0x7fL) != 0) {
                data[at++] = (byte) (left & 0x7f | 0x80);
                left >>>= 7;
            }
            data[at++] = (byte) left;
        }

        void field(byte[] bytes) {
            number(bytes == null ? -1 : bytes.length);
            if (bytes != null) put(bytes);
        }

        void put(byte[] bytes) {
            need(bytes.length);
            System.arraycopy(bytes, 0, data, at, bytes.length);
            at += bytes.length;
        }

        static int width(long number) {
            long left = number << 1 ^ number >> 63;
            return Math.max(1, (70 - Long.numberOfLeadingZeros(left)) / 7);
        }

        static int width(byte[] field) {
            return field == null ? 1 : width(field.length) + field.length;
        }
    }
}
