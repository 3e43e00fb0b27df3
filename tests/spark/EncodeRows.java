package kes.spark;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/** Encodes the cases of a file (JSON), and writes the batches or the error of each to another. Bytes are in base 64. */
public final class EncodeRows {
    public static void main(String[] files) throws Exception {
        ObjectMapper json = new ObjectMapper();
        List<Object> answers = new ArrayList<>();
        for (JsonNode one : json.readTree(Path.of(files[0]).toFile())) {
            StructType schema = (StructType) DataType.fromJson(one.get("schema").toString());
            UnsafeProjection unsafe = UnsafeProjection.create(schema);
            JsonNode shapes = one.get("shapes");
            Settings settings = new Settings(
                one.get("topic").textValue(), one.get("codec").asText(), one.get("level").asInt(),
                one.get("record_limit").asInt(), 35, one.get("batch_limit").asInt());
            List<Object> batches = new ArrayList<>();
            Encoder encoder = new Encoder(
                new Columns(schema), settings, "test",
                topic -> new Shape(
                    shapes.get(topic).get(0).asInt(),
                    shapes.get(topic).get(1).isNull() ? null : shapes.get(topic).get(1).asInt()),
                () -> one.get("now").asLong(), one.get("turn").asLong(),
                batch -> batches.add(List.of(
                    batch.topic(), batch.partition(), batch.partitions(), batch.bytes(), batch.checksum())));
            try {
                for (JsonNode row : one.get("rows")) encoder.add(unsafe.apply(row(schema, row)));
                encoder.finish();
                answers.add(Map.of("rows", encoder.rows(), "batches", batches));
            } catch (SinkRefused refused) {
                answers.add(Map.of("error", refused.getMessage()));
            }
        }
        json.writeValue(Path.of(files[1]).toFile(), answers);
    }

    private static InternalRow row(StructType schema, JsonNode row) {
        Object[] values = new Object[schema.length()];
        for (int i = 0; i < values.length; i++) {
            values[i] = value(schema.fields()[i].dataType().simpleString(), row.get(i));
        }
        return new GenericInternalRow(values);
    }

    private static Object value(String type, JsonNode value) {
        if (value.isNull()) return null;
        return switch (type) {
            case "string" -> UTF8String.fromBytes(Base64.getDecoder().decode(value.asText()));
            case "binary" -> Base64.getDecoder().decode(value.asText());
            case "tinyint" -> (byte) value.asInt();
            case "smallint" -> (short) value.asInt();
            case "int" -> value.asInt();
            case "bigint", "timestamp" -> value.asLong();
            default -> {
                List<Object> headers = new ArrayList<>();
                for (JsonNode header : value) {
                    headers.add(header.isNull() ? null : new GenericInternalRow(new Object[] {
                        value("string", header.get(0)), value("binary", header.get(1))}));
                }
                yield new GenericArrayData(headers.toArray());
            }
        };
    }
}
