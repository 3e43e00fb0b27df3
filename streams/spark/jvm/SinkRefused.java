package kes.spark;

/** What Python's sink raises, by the name of its class there. PySpark shows its message first, without a trace. */
public final class SinkRefused extends IllegalArgumentException {
    public SinkRefused(String kind, String message) {
        super(kind + ": " + message);
    }
}
