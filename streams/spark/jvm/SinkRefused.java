package kes.spark;

/**
 * What Python's sink raises, by the name of its class there: so that whoever reads messages (running/pipeline.py) finds
 * the same text, whichever half it came from. PySpark shows its message first, without a trace.
 */
public final class SinkRefused extends IllegalArgumentException {
    public SinkRefused(String kind, String message) {
        super("streams.errors." + kind + ": " + message);
    }
}
