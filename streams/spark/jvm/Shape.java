package kes.spark;

import java.io.Serializable;

/** A topic. {@code batchBytes}: the largest batch that it takes; null: not known. */
public record Shape(int partitions, Integer batchBytes) implements Serializable {}
