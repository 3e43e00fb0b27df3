package kes.spark;

import java.io.Serializable;

/**
 * What tasks must know of a write. {@code topic} is null where every row names its own; {@code overhead} is what a
 * record has beside key, value and headers, in the count of kafka.message.max.bytes.
 */
public record Settings(String topic, String codec, int level, int recordLimit, int overhead, int batchLimit)
    implements Serializable {}
