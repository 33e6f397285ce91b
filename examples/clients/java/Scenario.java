import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/**
 * The scenario that every client of examples/clients runs: java Scenario ADDR GROUP [TOKEN [CA]]
 *
 * <p>Adds 1,000 messages, acknowledges 900, and receives exactly the other 100 as timeouts, whatever happens to its
 * connection meanwhile. The first batch is given back once, and must be redelivered. Prints its figures as one line of
 * JSON; exits with 1 and says why if they are wrong.
 */
public final class Scenario {
    private static final Duration PATIENCE = Duration.ofSeconds(60), A_LITTLE_LONGER = Duration.ofMillis(500);

    private final AtomicInteger added = new AtomicInteger(), acked = new AtomicInteger();
    private final AtomicInteger outcomeUnknown = new AtomicInteger();
    private int timedOut, unexpected, givenBack, redelivered, drained;

    public static void main(String[] arguments) throws Exception {
        if (arguments.length < 2 || arguments.length > 4) {
            fail("usage: java Scenario ADDR GROUP [TOKEN [CA]]");
        }
        int colon = arguments[0].lastIndexOf(':');
        String token = arguments.length > 2 ? arguments[2] : "";
        SSLContext tls = arguments.length > 3 ? trusting(arguments[3]) : null;
        Scenario scenario = new Scenario();
        try (Ackwheel client = Ackwheel.connect(new Ackwheel.Options(arguments[0].substring(0, colon),
                Integer.parseInt(arguments[0].substring(colon + 1)), token, "Scenario", arguments[1], 10_000, true, tls))) {
            scenario.run(client);
        } catch (Ackwheel.Failure failure) {
            fail("code " + failure.code + ", retryable " + failure.retryable + ": " + failure.getMessage());
        }
        System.out.println(scenario);
        if (scenario.added.get() != 1_000 || scenario.acked.get() != 900 || scenario.timedOut != 100
                || scenario.unexpected != 0) {
            fail("expected: 1,000 added, 900 acked, 100 timed out, nothing unexpected");
        }
    }

    /** TLS with the servers whose certificate the authority in this file has signed. */
    private static SSLContext trusting(String file) throws Exception {
        KeyStore authorities = KeyStore.getInstance(KeyStore.getDefaultType());
        authorities.load(null, null);
        try (InputStream pem = Files.newInputStream(Path.of(file))) {
            authorities.setCertificateEntry("authority", CertificateFactory.getInstance("X.509").generateCertificate(pem));
        }
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(authorities);
        SSLContext tls = SSLContext.getInstance("TLS");
        tls.init(null, trust.getTrustManagers(), null);
        return tls;
    }

    private static void fail(String why) {
        System.err.println(why);
        System.exit(1);
    }

    @Override
    public String toString() {
        return String.format("{\"added\":%s,\"acked\":%s,\"timed_out\":%d,\"unexpected\":%d,\"given_back\":%d,"
                + "\"redelivered\":%d,\"drained\":%d,\"outcome_unknown\":%s}", added, acked, timedOut, unexpected,
                givenBack, redelivered, drained, outcomeUnknown);
    }

    private void run(Ackwheel client) throws InterruptedException {
        // Ids and clients beyond what a signed 64-bit integer holds: all of them are legal.
        List<Ackwheel.Message> all = new ArrayList<>(), acknowledged = new ArrayList<>();
        Set<Ackwheel.Message> silent = Collections.synchronizedSet(new HashSet<>());
        for (int i = 0; i < 1_000; i++) {
            all.add(new Ackwheel.Message(Long.MIN_VALUE - 500 + i, -1 - i));
            (i % 10 == 9 ? silent : acknowledged).add(all.get(i));
        }
        // All requests of a step are in flight at once.
        inChunks(all, chunk -> add(client, chunk));
        CompletableFuture<Void> nothing = giveBackNothing(client);
        inChunks(acknowledged, chunk -> acknowledge(client, chunk));
        wait(nothing);
        listen(client, silent);
    }

    private interface Step {
        CompletableFuture<?> of(List<Ackwheel.Message> chunk);
    }

    private static void inChunks(List<Ackwheel.Message> messages, Step step) {
        List<CompletableFuture<?>> steps = new ArrayList<>();
        for (int start = 0; start < messages.size(); start += 50) {
            steps.add(step.of(messages.subList(start, start + 50)));
        }
        wait(CompletableFuture.allOf(steps.toArray(CompletableFuture[]::new)));
    }

    private static void wait(CompletableFuture<Void> steps) {
        try {
            steps.join();
        } catch (CompletionException failed) {
            throw failed.getCause() instanceof Ackwheel.Failure failure ? failure : failed;
        }
    }

    private CompletableFuture<Void> add(Ackwheel client, List<Ackwheel.Message> chunk) {
        return untilItSucceeds(() -> client.addNewMsg(chunk, 0, 1), false).thenAccept(result -> {
            int rearmed = result.repeated ? 0 : result.value.rearmed().cardinality();
            added.addAndGet(chunk.size() - rearmed);
        });
    }

    private CompletableFuture<Void> acknowledge(Ackwheel client, List<Ackwheel.Message> chunk) {
        return untilItSucceeds(() -> client.delMsg(chunk, false), false).thenAccept(result -> {
            for (Ackwheel.Outcome outcome : result.value) {
                // What an earlier try acknowledged is unknown to the second.
                boolean before = result.repeated && outcome == Ackwheel.Outcome.UNKNOWN;
                acked.addAndGet(outcome == Ackwheel.Outcome.ACKED || before ? 1 : 0);
            }
        });
    }

    /** What a client says of batches before it is subscribed again is no mistake: it may be repeated. */
    private CompletableFuture<Void> giveBackNothing(Ackwheel client) {
        Ackwheel.BatchId nobodys = new Ackwheel.BatchId(0, 0, 0, 0);
        return untilItSucceeds(() -> client.batchNack(nobodys, Duration.ZERO), false)
                .thenAccept(result -> unexpected += result.value ? 1 : 0);
    }

    private record Result<T>(T value, boolean repeated) {}

    /** Repeats a request while that may help; says whether an earlier try may have been applied. */
    private <T> CompletableFuture<Result<T>> untilItSucceeds(Supplier<CompletableFuture<T>> request, boolean repeated) {
        return request.get().thenApply(value -> new Result<>(value, repeated)).exceptionallyCompose(error -> {
            Throwable cause = error instanceof CompletionException wrapped ? wrapped.getCause() : error;
            if (!(cause instanceof Ackwheel.Failure failure) || !failure.retryable) {
                return CompletableFuture.failedFuture(cause);
            }
            outcomeUnknown.addAndGet(failure.outcomeUnknown ? 1 : 0);
            return CompletableFuture.supplyAsync(() -> null,
                    CompletableFuture.delayedExecutor(20, java.util.concurrent.TimeUnit.MILLISECONDS))
                    .thenCompose(later -> untilItSucceeds(request, repeated || failure.outcomeUnknown));
        });
    }

    /** Takes batches until all that must time out has come and is settled, and for a little longer. */
    private void listen(Ackwheel client, Set<Ackwheel.Message> missing) throws InterruptedException {
        Set<Ackwheel.BatchId> dealtWith = new HashSet<>();
        while (true) {
            Ackwheel.TimeoutBatch batch = client.nextBatch(missing.isEmpty() ? A_LITTLE_LONGER : PATIENCE);
            if (batch == null) {
                return;
            }
            redelivered += batch.deliveryCount() > 1 ? 1 : 0;
            if (givenBack == 0) {
                boolean held = client.batchNack(batch.id(), Duration.ofMillis(50)).exceptionally(lost -> false).join();
                givenBack += held ? 1 : 0;
                continue;
            }
            if (dealtWith.add(batch.id())) {
                drained += batch.drained() ? 1 : 0;
                for (Ackwheel.Message message : batch.messages()) {
                    if (missing.remove(message)) {
                        timedOut++;
                    } else {
                        unexpected++;
                    }
                }
            }
            // The client would repeat it by itself; but it is closed soon.
            while (client.batchAck(List.of(batch.id())).exceptionally(lost -> -1).join() < 0) {
                Thread.sleep(20);
            }
        }
    }
}
