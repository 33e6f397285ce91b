import static java.nio.ByteBuffer.allocate;
import static java.nio.charset.StandardCharsets.UTF_8;
import java.io.*;
import java.net.*;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.locks.LockSupport;
import java.util.function.*;
import java.util.stream.IntStream;
import javax.net.ssl.*;

/**
 * A client of ackwheel in one file, for Java 17 and version 1 of docs/PROTOCOL.md. When its connection is lost it connects again and
 * subscribes again. Requests that were not answered by then end with a {@link Failure} that says {@code outcomeUnknown}; without a
 * connection they fail at once, not applied. The caller repeats what should be, except for a batchAck, which the client repeats: on the next
 * connection, and when its batch comes again. Futures are completed by the thread that reads, which holds no lock then: do not block it.
 * Ids and clients are unsigned: see {@link Long#toUnsignedString(long)}. A Redis client library needs no such file: see docs/RESP.md.
 */
public final class Ackwheel implements AutoCloseable {
    private static final int HELLO = 0x01, PING = 0x02, GO_AWAY = 0x03, ADD_NEW_MSG = 0x10, DEL_MSG = 0x11;
    private static final int SUBSCRIBE = 0x20, TIMEOUT_BATCH = 0x21, BATCH_ACK = 0x22, BATCH_NACK = 0x23;
    private static final int ANSWER = 0x80, PONG = 0x82, ERROR = 0xff; // An answer: its request's type and this bit.
    private static final int HELLO_ID = 1, SUBSCRIBE_ID = 2; // The ids of other requests lie behind them.
    private static final int BODY = 8; // where the body begins in a frame without its length: type, flags, status, id
    private static final int MAX_FRAME_LENGTH = 1 << 20, MAX_BATCH_IDS = 4_096, PATIENCE_MS = 5_000, FIRST_PAUSE_MS = 100;

    /** Known by both of its numbers; the client is 0 where none is given. */
    public record Message(long id, long client) {}

    /** The same on every delivery: a consumer knows by it what it has dealt with already. */
    public record BatchId(int ring, int seq, long epoch, long tick) {}

    /** Messages that nobody acknowledged, and of each its attempt; with a count above 1 they were delivered before. */
    public record TimeoutBatch(BatchId id, int deliveryCount, long ageMs, long added, long acked, boolean last,
            boolean storm, boolean drained, List<Message> messages, int[] attempts) {}

    /** The tick of the deadline, and which of the messages were in flight already. */
    public record Added(long deadline, BitSet rearmed) {}

    /** What became of a message with delMsg. */
    public enum Outcome { UNKNOWN, ACKED, LATE, WITHDRAWN }

    /** Without a group there are no batches. The credit is for messages in batches that are not acknowledged. */
    public record Options(String host, int port, String token, String name, String group, int credit, boolean fromEnd,
            SSLContext tls) {
        /** Without TLS. */
        public Options(String host, int port, String token, String name, String group, int credit, boolean fromEnd) {
            this(host, port, token, name, group, credit, fromEnd, null);
        }
    }

    /** Why a request failed. Unless its outcome is unknown no part of it was applied; if retryable, try later. */
    public static final class Failure extends RuntimeException {
        private static final long serialVersionUID = 1;
        public final int code; // that of the server's Error; 0 where the client itself gave up
        public final boolean outcomeUnknown, retryable;
        Failure(int code, boolean outcomeUnknown, boolean retryable, String text) {
            super(text);
            this.code = code;
            this.outcomeUnknown = outcomeUnknown;
            this.retryable = retryable;
        }
    }

    private record Call<T>(int answer, Function<ByteBuffer, T> read, CompletableFuture<T> result) {
        Runnable completion(ByteBuffer frame) { T value = read.apply(frame); return () -> result.complete(value); }
    }

    private final Options options;
    private final Thread reader = new Thread(this::run, "ackwheel reader");
    private final ThreadPoolExecutor writer = new ThreadPoolExecutor(1, 1, 0, TimeUnit.SECONDS,
            new LinkedBlockingQueue<>(), task -> new Thread(task, "ackwheel writer"));
    private final CompletableFuture<Boolean> begun = new CompletableFuture<>(), ended = new CompletableFuture<>();
    private final LinkedBlockingQueue<TimeoutBatch> batches = new LinkedBlockingQueue<>();
    private Map<Integer, Call<?>> unanswered = new HashMap<>(); // guarded by this, as is all below
    private final Set<BatchId> acked = new HashSet<>(); // acknowledged, and not known to be settled: not delivered again
    private OutputStream out;
    private int lastId = SUBSCRIBE_ID, pingIntervalMs, pauseMs = FIRST_PAUSE_MS;
    private volatile boolean up, subscribed, closing;
    private volatile Socket socket; // While the client closes no other follows it.
    private Failure lost = new Failure(0, false, true, "no connection in time");
    private Ackwheel(Options options) { this.options = options; }

    /** Returns a connected client, or throws a {@link Failure} that says why there is none. */
    public static Ackwheel connect(Options options) {
        Ackwheel client = new Ackwheel(options);
        client.reader.start();
        if (client.begun.completeOnTimeout(false, PATIENCE_MS, TimeUnit.MILLISECONDS).join()) { return client; }
        Failure why = client.lost;
        client.close();
        throw why;
    }

    /** Says GoAway and waits until the server has closed, so that no answer is lost; after 5 s it closes itself. */
    @Override public void close() {
        synchronized (this) {
            if (up && !closing) {
                send(GO_AWAY, 0, newId(), allocate(8).putInt(2 << 16).putInt(PATIENCE_MS)); // done
                lost = new Failure(0, false, true, "the client was closed");
            }
            closing = true;
            LockSupport.unpark(reader); // It may be between two connections.
        }
        CompletableFuture.delayedExecutor(up ? PATIENCE_MS : 0, TimeUnit.MILLISECONDS, Runnable::run).execute(
                () -> { try { socket.close(); } catch (IOException gone) { /* The reader notices, and ends. */ } });
        ended.copy().completeOnTimeout(false, PATIENCE_MS + FIRST_PAUSE_MS, TimeUnit.MILLISECONDS).join();
    }

    /** Takes messages into flight, before they are pushed; 0 ticks are the default, one revolution. */
    public CompletableFuture<Added> addNewMsg(List<Message> messages, int ackTimeoutTicks, int attempt) {
        int head = within(0xffff, ackTimeoutTicks, "ackTimeoutTicks") << 16 | within(0xff, attempt, "attempt") << 8;
        return limited(request(ADD_NEW_MSG, 1, list(allocate(8 + 16 * messages.size()).putInt(head), messages),
                frame -> new Added(frame.getLong(), BitSet.valueOf(frame.position(BODY + 16)))));
    }

    /** Reports Acks, or pushes that failed. It has no time limit: a server holds it while its store is away. */
    public CompletableFuture<List<Outcome>> delMsg(List<Message> messages, boolean withdraw) {
        return request(DEL_MSG, withdraw ? 3 : 1, list(allocate(4 + 16 * messages.size()), messages), frame ->
                IntStream.range(0, frame.getInt()).mapToObj(i -> Outcome.values()[frame.get()]).toList());
    }

    /** The next timeout batch; null if none came in time. Throws a {@link Failure} when the client has ended. */
    public TimeoutBatch nextBatch(Duration wait) throws InterruptedException {
        TimeoutBatch batch = batches.poll(wait.toMillis(), TimeUnit.MILLISECONDS);
        if (batch == null && ended.isDone()) { throw lost; }
        return batch;
    }

    /** Settles batches that were dealt with; answers how many were not settled before. If it fails it is repeated. */
    public synchronized CompletableFuture<Integer> batchAck(List<BatchId> ids) {
        ByteBuffer body = allocate(4 + 24 * ids.size()).putInt(ids.size());
        for (BatchId id : ids) {
            put(body, id);
            batches.removeIf(copy -> copy.id.equals(id));
            if (acked.size() < MAX_BATCH_IDS) { acked.add(id); } // Of more than these the client knows nothing: they are redelivered.
        }
        return limited(request(BATCH_ACK, 0, body, frame -> { ids.forEach(acked::remove); return frame.getInt(); }));
    }

    /** Gives a batch back, for others or for later; answers whether this connection held it. */
    public CompletableFuture<Boolean> batchNack(BatchId id, Duration delay) {
        ByteBuffer body = put(allocate(28), id).putInt(within(0xffff_ffffL, delay.toMillis(), "delay"));
        return limited(request(BATCH_NACK, 0, body, frame -> frame.get(1) == 1));
    }

    private static int within(long most, long value, String name) {
        if (value < 0 || value > most) { throw new IllegalArgumentException(name + " must be from 0 to " + most + ", not " + value); }
        return (int) value;
    }

    private static ByteBuffer put(ByteBuffer to, BatchId id) { return to.putInt(id.ring << 16).putInt(id.seq).putLong(id.epoch).putLong(id.tick); }
    private static ByteBuffer list(ByteBuffer body, List<Message> messages) {
        body.putInt(messages.size());
        messages.forEach(message -> body.putLong(message.id));
        messages.forEach(message -> body.putLong(message.client));
        return body;
    }

    private synchronized <T> CompletableFuture<T> request(int kind, int flags, ByteBuffer body, Function<ByteBuffer, T> read) {
        if (!up || closing || !subscribed && !options.group.isEmpty() && (kind == BATCH_ACK || kind == BATCH_NACK)) {
            String why = "not connected, or not subscribed again: " + lost.getMessage();
            return CompletableFuture.failedFuture(new Failure(0, false, !closing && (up || lost.retryable), why));
        }
        CompletableFuture<T> result = new CompletableFuture<>();
        int id = newId();
        unanswered.put(id, new Call<>(kind | ANSWER, read, result));
        send(kind, flags, id, body);
        return result;
    }

    /** A request that ran out of time keeps its correlation id until it is answered. */
    private static <T> CompletableFuture<T> limited(CompletableFuture<T> result) {
        return result.orTimeout(PATIENCE_MS, TimeUnit.MILLISECONDS).exceptionally(error -> {
            throw error instanceof Failure failure ? failure : new Failure(0, true, true, "not answered in time");
        });
    }

    private synchronized int newId() {
        while (unanswered.containsKey(lastId = lastId == -1 ? SUBSCRIBE_ID + 1 : lastId + 1)) { /* It is in use. */ }
        return lastId;
    }

    private void send(int kind, int flags, int id, ByteBuffer body) {
        OutputStream to = out;
        ByteBuffer frame = allocate(12 + body.capacity()).putInt(8 + body.capacity());
        frame.putInt(kind << 24 | flags << 16).putInt(id).put(body.rewind());
        writer.execute(() -> {
            try {
                to.write(frame.array());
                if (writer.getQueue().isEmpty()) { // What is ready at the same time goes out in one write.
                    to.flush();
                }
            } catch (IOException gone) { /* The reader notices. */ }
        });
    }

    private void run() {
        for (socket = new Socket(); !closing && lost.retryable; socket = new Socket()) {
            try (Socket connection = socket) {
                connection.setTcpNoDelay(true);
                connection.connect(new InetSocketAddress(options.host, options.port), PATIENCE_MS);
                read(options.tls == null ? connection : secure(connection));
            } catch (IOException | RuntimeException error) { // the latter if refused, or if a frame cannot be read
                disconnect(error instanceof Failure why ? why : new Failure(0, false, true, error.toString())).run();
            }
            LockSupport.parkNanos(closing ? 0 : ThreadLocalRandom.current().nextLong(pauseMs / 2, pauseMs) * 1_000_000);
            pauseMs = Math.min(2 * pauseMs, PATIENCE_MS);
        }
        writer.shutdown();
        ended.complete(true);
        begun.complete(false);
    }

    /** Asks for batches, if that is still the connection. */
    private synchronized void subscribe(OutputStream to) {
        byte[] group = options.group.getBytes(UTF_8);
        if (group.length > 0 && up && to == out) {
            send(SUBSCRIBE, options.fromEnd ? 2 : 0, SUBSCRIBE_ID,
                    allocate(5 + group.length).putInt(options.credit).put((byte) group.length).put(group));
        }
    }

    private synchronized Runnable disconnect(Failure why) {
        lost = closing ? lost : why;
        Failure failure = new Failure(0, true, true, "the connection was lost: " + lost.getMessage());
        Collection<Call<?>> calls = unanswered.values();
        unanswered = new HashMap<>();
        up = subscribed = false;
        batches.clear(); // They are redelivered.
        return () -> calls.forEach(call -> call.result.completeExceptionally(failure));
    }

    private Socket secure(Socket connection) throws IOException {
        SSLSocket secured = (SSLSocket) options.tls.getSocketFactory().createSocket(connection, options.host, options.port, true);
        SSLParameters parameters = secured.getSSLParameters();
        parameters.setEndpointIdentificationAlgorithm("HTTPS"); // The certificate must be for this host.
        secured.setSSLParameters(parameters);
        secured.setSoTimeout(PATIENCE_MS);
        secured.startHandshake();
        return secured;
    }

    private void read(Socket connection) throws IOException {
        out = new BufferedOutputStream(connection.getOutputStream());
        pingIntervalMs = PATIENCE_MS;
        InputStream listener = new FilterInputStream(connection.getInputStream()) {
            @Override public int read(byte[] bytes, int start, int length) throws IOException {
                connection.setSoTimeout(pingIntervalMs);
                try {
                    return super.read(bytes, start, length);
                } catch (SocketTimeoutException silence) { // After an interval it is asked for a sign of life, once.
                    send(PING, 0, newId(), allocate(0));
                    return super.read(bytes, start, length);
                }
            }
        };
        DataInputStream in = new DataInputStream(new BufferedInputStream(listener));
        byte[] token = options.token.getBytes(UTF_8), name = options.name.getBytes(UTF_8);
        ByteBuffer hello = allocate(9 + token.length + name.length).put("ACKW\1\1".getBytes(UTF_8));
        send(HELLO, 0, HELLO_ID, hello.putShort((short) token.length).put(token).put((byte) name.length).put(name));
        while (up || !closing) { // It may be closed before it is connected.
            int length = in.readInt(), top = length >> 16;
            if (length < BODY || length > MAX_FRAME_LENGTH) {
                String why = ": no ackwheel port?" + (top == 0x4854 ? " It is HTTP: the admin port?" : top == 0x1503 ? " It wants TLS." : "");
                throw new Failure(0, false, true, "the server sent a frame of length " + Integer.toUnsignedString(length) + why);
            }
            byte[] frame = new byte[length];
            in.readFully(frame); // A part of a frame is none.
            receive(ByteBuffer.wrap(frame)).run();
        }
    }

    /** Returns what completes a future, for after the lock: what callers do then may wait for locks of their own. */
    private synchronized Runnable receive(ByteBuffer frame) {
        int kind = frame.get() & 0xff, flags = frame.get(), status = frame.getShort() & 0xffff, id = frame.getInt();
        Call<?> call = unanswered.get(id);
        if (kind == PING) {
            send(PONG, 0, id, frame.slice());
        } else if (kind == TIMEOUT_BATCH) {
            TimeoutBatch batch = readBatch(flags, frame);
            if (acked.contains(batch.id)) {
                batchAck(List.of(batch.id));
            } else {
                batches.removeIf(copy -> copy.id.equals(batch.id)); // One waits, however slow the consumer is.
                batches.add(batch);
            }
        } else if (kind == (HELLO | ANSWER)) {
            pingIntervalMs = frame.getInt(BODY + 20);
            up = !closing;
            subscribe(out);
        } else if (kind == ERROR) {
            Failure failure = new Failure(status, (flags & 1) != 0, (flags & 2) != 0, UTF_8.decode(frame).toString());
            if (id == SUBSCRIBE_ID && failure.retryable) { // Meanwhile requests are served, delMsg above all.
                OutputStream to = out; // There may be another later.
                CompletableFuture.delayedExecutor(1, TimeUnit.SECONDS).execute(() -> subscribe(to));
                lost = failure;
            } else if (call == null) {
                throw id == 0 && up ? new Failure(status, false, true, failure.getMessage()) : failure; // Of a wrong frame, or a refusal.
            } else {
                unanswered.remove(id);
                return () -> call.result.completeExceptionally(failure);
            }
        } else if (call != null && kind == call.answer) {
            Runnable completion = call.completion(frame);
            unanswered.remove(id);
            return completion;
        }
        if (kind == ((options.group.isEmpty() ? HELLO : SUBSCRIBE) | ANSWER)) {
            subscribed = up;
            pauseMs = FIRST_PAUSE_MS;
            begun.complete(true);
            if (subscribed && !acked.isEmpty()) { batchAck(List.copyOf(acked)); }
        }
        return () -> { };
    }

    private static TimeoutBatch readBatch(int flags, ByteBuffer body) {
        BatchId id = new BatchId(body.getInt() >>> 16, body.getInt(), body.getLong(), body.getLong());
        int at = BODY + 56, count = body.getInt(at - 4);
        IntFunction<Message> message = i -> new Message(body.getLong(at + 8 * i), body.getLong(at + 8 * (count + i)));
        int[] attempts = IntStream.range(0, count).map(i -> body.get(at + 16 * count + i) & 0xff).toArray();
        return new TimeoutBatch(id, body.getInt(), body.getLong(), body.getLong(), body.getLong(), (flags & 1) != 0,
                (flags & 2) != 0, (flags & 4) != 0, IntStream.range(0, count).mapToObj(message).toList(), attempts);
    }
}
