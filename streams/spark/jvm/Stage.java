package kes.spark;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.Serializable;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;

/** The bytes of one task on their way to the driver: in memory, and in a file when they have grown past a threshold. */
final class Stage implements Encoder.Target {
    /**
     * A folder below {@code root}, by the names that lead to it: what writing/folders.py makes of the option
     * stagingDir. {@code owner}: the only user who may look into it, by number; -1: whoever may look into the root.
     */
    record Folder(String root, List<String> names, int owner) implements Serializable {
        Folder in(String... more) {
            List<String> all = new ArrayList<>(names);
            all.addAll(List.of(more));
            return new Folder(root, all, owner);
        }

        Path path() {
            return Path.of(root, names.toArray(new String[0]));
        }

        @Override public String toString() {
            return path().toString();
        }
    }

    private static final int ATTEMPTS = 10;
    private static final long LARGEST_MESSAGE = 256 << 20;

    private final Folder folder;
    private final long threshold;
    private final List<Done.Batch> batches = new ArrayList<>();
    private final ByteArrayOutputStream memory = new ByteArrayOutputStream();
    private OutputStream target = memory;
    private String name;
    private long size;

    /** {@code folder}: null where driver and tasks share none. */
    Stage(Folder folder, long threshold) {
        this.folder = folder;
        this.threshold = threshold;
    }

    @Override public void take(Encoder.Batch batch) {
        batches.add(new Done.Batch(
            batch.topic(), batch.partition(), batch.partitions(), batch.bytes().length, batch.checksum()));
        try {
            target.write(batch.bytes());
            size += batch.bytes().length;
            if (name == null && size > threshold) overflow();
        } catch (IOException error) {
            throw failed(error);
        }
    }

    private void overflow() throws IOException {
        if (folder == null) {
            if (size > LARGEST_MESSAGE) {
                throw new SinkRefused("ConfigError", "a task has more than " + (LARGEST_MESSAGE >> 20)
                    + " MiB to write: give the option stagingDir (a folder that driver and executors share), or split "
                    + "the rows into more partitions");
            }
            return;
        }
        String made = UUID.randomUUID().toString().replace("-", "") + ".batches";
        target = create(made);
        name = made;
        memory.writeTo(target);
        memory.reset();
    }

    private OutputStream create(String made) throws IOException {
        for (int attempt = 1;; attempt++) {
            try {
                int mode = makeFolders();
                Path file = folder.path().resolve(made);
                OutputStream out = Files.newOutputStream(file);
                Files.setAttribute(file, "unix:mode", mode & 0666);
                return out;
            } catch (NoSuchFileException error) { // another run has just tidied up an empty folder on the way
                if (attempt == ATTEMPTS) throw error;
            }
        }
    }

    /** Makes the folders, for whom the root is for: its mode is theirs. */
    private int makeFolders() throws IOException {
        Path at = Files.createDirectories(Path.of(folder.root()));
        int mode = folder.owner() >= 0 ? 0700 : (int) Files.getAttribute(at, "unix:mode") & 02777;
        for (String step : folder.names()) {
            at = at.resolve(step);
            try {
                Files.createDirectory(at);
                Files.setAttribute(at, "unix:mode", mode); // without the umask, which would keep out the driver's user
            } catch (FileAlreadyExistsException known) {
                // Any user may write into the temporary folder, so ours in it may be another user's: to read along.
                if (folder.owner() >= 0 && step.equals(folder.names().get(0))) checkOwn(at);
            }
        }
        return mode;
    }

    private void checkOwn(Path at) throws IOException {
        boolean own = (int) Files.getAttribute(at, "unix:uid", LinkOption.NOFOLLOW_LINKS) == folder.owner();
        if (!own || !Files.isDirectory(at, LinkOption.NOFOLLOW_LINKS)) {
            throw new SinkRefused("StagingError", at + " is not this user's: remove it, or give the option stagingDir "
                + "(a folder of your own)");
        }
        if (((int) Files.getAttribute(at, "unix:mode") & 077) != 0) Files.setAttribute(at, "unix:mode", 0700);
    }

    /** Returns the task's message. */
    Done finish(long rows, String query, long batch) {
        try {
            target.close(); // a store keeps nothing before
        } catch (IOException error) {
            throw failed(error);
        }
        byte[] data = name == null && size > 0 ? memory.toByteArray() : null;
        return new Done(rows, size, data, name, batches, query, batch);
    }

    /** Removes what was staged. Never raises. */
    void discard() {
        try {
            target.close();
            if (name != null) Files.deleteIfExists(folder.path().resolve(name));
        } catch (IOException left) {
            // The next run of the same write, or the next batch, removes the folder.
        }
    }

    private SinkRefused failed(IOException error) {
        return new SinkRefused("StagingError", "cannot stage rows in " + folder + " (option stagingDir): " + error);
    }
}
