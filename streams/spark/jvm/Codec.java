package kes.spark;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.zip.GZIPOutputStream;

import com.github.luben.zstd.Zstd;
import net.jpountz.lz4.LZ4Compressor;
import net.jpountz.lz4.LZ4Factory;
import org.xerial.snappy.Snappy;

/** Kafka's codecs, by the libraries that Spark has. Not thread-safe. */
abstract class Codec {
    private final int attribute;

    private Codec(int attribute) {
        this.attribute = attribute;
    }

    /** Its number in the attributes of a batch. */
    int attribute() {
        return attribute;
    }

    /** Returns null where there is nothing to gain. */
    abstract byte[] compress(byte[] data, int size);

    static Codec of(String name, int level) {
        return switch (name) {
            case "none" -> new Codec(0) {
                @Override byte[] compress(byte[] data, int size) {
                    return null;
                }
            };
            case "gzip" -> new Codec(1) {
                @Override byte[] compress(byte[] data, int size) {
                    ByteArrayOutputStream out = new ByteArrayOutputStream(size / 2 + 64);
                    try (GZIPOutputStream gzip = new GZIPOutputStream(out, 1 << 16) {{ def.setLevel(level); }}) {
                        gzip.write(data, 0, size);
                    } catch (IOException error) {
                        throw new UncheckedIOException(error);
                    }
                    return out.toByteArray();
                }
            };
            case "snappy" -> new Codec(2) {
                @Override byte[] compress(byte[] data, int size) {
                    byte[] out = new byte[Snappy.maxCompressedLength(size)];
                    try {
                        return Arrays.copyOf(out, Snappy.compress(data, 0, size, out, 0));
                    } catch (IOException error) {
                        throw new UncheckedIOException(error);
                    }
                }
            };
            case "lz4" -> new Lz4();
            case "zstd" -> new Codec(4) {
                private byte[] out = {};

                @Override byte[] compress(byte[] data, int size) {
                    int most = (int) Zstd.compressBound(size);
                    if (out.length < most) out = new byte[most];
                    long packed = Zstd.compressByteArray(out, 0, out.length, data, 0, size, level);
                    if (Zstd.isError(packed)) throw new IllegalStateException("zstd: " + Zstd.getErrorName(packed));
                    return packed < size ? Arrays.copyOf(out, (int) packed) : null;
                }
            };
            default -> throw new IllegalArgumentException("no codec " + name);
        };
    }

    /** A frame whose blocks do not depend on each other: Kafka's brokers read no others. */
    private static final class Lz4 extends Codec {
        private static final byte[] HEAD = {0x04, 0x22, 0x4d, 0x18, 0x60, 0x70, 0x73};
        private static final int BLOCK = 4 << 20;
        private final LZ4Compressor compressor = LZ4Factory.fastestInstance().fastCompressor();

        Lz4() {
            super(3);
        }

        @Override byte[] compress(byte[] data, int size) {
            int blocks = (size + BLOCK - 1) / BLOCK;
            ByteBuffer out = ByteBuffer.allocate(
                HEAD.length + 4 + blocks * (4 + compressor.maxCompressedLength(Math.min(size, BLOCK)))
            ).order(ByteOrder.LITTLE_ENDIAN);
            out.put(HEAD);
            for (int start = 0; start < size; start += BLOCK) {
                int length = Math.min(BLOCK, size - start), at = out.position() + 4;
                int packed = compressor.compress(data, start, length, out.array(), at, out.capacity() - at);
                if (packed < length) {
                    out.putInt(packed).position(at + packed);
                } else {
                    out.putInt(length | 1 << 31).put(data, start, length); // the bit: not compressed
                }
            }
            out.putInt(0);
            return Arrays.copyOf(out.array(), out.position());
        }
    }
}
