package kes.spark;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;

/** Stages the batches of each case of a file (JSON), and prints the message or the error of each. Bytes are in base 64. */
public final class StageRows {
    public static void main(String[] files) throws Exception {
        ObjectMapper json = new ObjectMapper();
        List<Object> answers = new ArrayList<>();
        for (JsonNode one : json.readTree(Path.of(files[0]).toFile())) {
            List<String> names = new ArrayList<>();
            one.get("names").forEach(name -> names.add(name.asText()));
            Stage.Folder folder = new Stage.Folder(one.get("root").asText(), names, one.get("owner").asInt());
            Stage stage = new Stage(folder, one.get("threshold").asLong());
            try {
                for (JsonNode batch : one.get("batches")) {
                    stage.take(new Encoder.Batch(
                        batch.get(0).asText(), batch.get(1).asInt(), batch.get(2).asInt(), batch.get(3).binaryValue(),
                        batch.get(4).asLong()));
                }
                answers.add(stage.finish(one.get("rows").asLong(), null, -1));
            } catch (SinkRefused refused) {
                stage.discard(); // as Spark does with a task that fails
                answers.add(Map.of("error", refused.getMessage()));
            }
        }
        System.out.println(json.writeValueAsString(answers));
    }
}
