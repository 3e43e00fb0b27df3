package kes.spark;

import java.io.Serializable;
import java.util.Arrays;
import java.util.List;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.types.StructType;

/** Where the columns of records are in a row. Their types were checked by columns.py. */
public final class Columns implements Serializable {
    static final int TOPIC = 0, KEY = 1, VALUE = 2, TYPE = 3, VERSION = 4, HEADERS = 5, PARTITION = 6, TIMESTAMP = 7;
    private static final List<String> NAMES =
        List.of("topic", "key", "value", "type", "version", "headers", "partition", "timestamp");

    private final int[] at = new int[NAMES.size()];
    private final DataType[] types = new DataType[NAMES.size()];

    public Columns(StructType schema) {
        List<String> given = Arrays.asList(schema.fieldNames());
        for (int i = 0; i < at.length; i++) {
            at[i] = given.indexOf(NAMES.get(i));
            if (at[i] >= 0) types[i] = schema.fields()[at[i]].dataType();
        }
    }

    /** -1: there is no such column. */
    int of(int column) {
        return at[column];
    }

    byte[] bytes(InternalRow row, int column) {
        int i = at[column];
        if (i < 0 || row.isNullAt(i)) return null;
        return types[column] instanceof BinaryType ? row.getBinary(i) : row.getUTF8String(i).getBytes();
    }

    Long number(InternalRow row, int column) {
        int i = at[column];
        if (i < 0 || row.isNullAt(i)) return null;
        DataType type = types[column];
        if (type instanceof IntegerType) return (long) row.getInt(i);
        if (type instanceof ShortType) return (long) row.getShort(i);
        return type instanceof ByteType ? (long) row.getByte(i) : row.getLong(i);
    }
}
