import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CountDownLatch;

/**
 * What the scenario does not show: java Manners ADDR GROUP GATE
 *
 * <p>Asks while it holds a lock that the callbacks want too, closes more than once, and is slow with its batches until
 * the file GATE is there: then one copy waits. Prints a line of JSON; exits with 1 and says why if something is wrong.
 */
public final class Manners {
    private static final List<Ackwheel.Message> UNKNOWN = List.of(new Ackwheel.Message(1, 0));

    public static void main(String[] arguments) throws IOException, InterruptedException {
        failWithoutServer();
        int colon = arguments[0].lastIndexOf(':');
        Ackwheel client = Ackwheel.connect(new Ackwheel.Options(arguments[0].substring(0, colon),
                Integer.parseInt(arguments[0].substring(colon + 1)), "", "Manners", arguments[1], 100, true));
        int lost = 0;
        for (int i = 0; i < 20; i++) {
            lost += askUnderLock(client);
        }
        mustRefuse(() -> client.addNewMsg(UNKNOWN, 65_536, 1));
        mustRefuse(() -> client.addNewMsg(UNKNOWN, -1, 1));
        mustRefuse(() -> client.addNewMsg(UNKNOWN, 1, 256));
        mustRefuse(() -> client.addNewMsg(UNKNOWN, 1, -1));
        mustRefuse(() -> client.batchNack(new Ackwheel.BatchId(0, 0, 0, 0), Duration.ofDays(50)));
        client.addNewMsg(List.of(new Ackwheel.Message(7, 0)), 1, 200).join();
        while (!Files.exists(Path.of(arguments[2]))) {
            Thread.sleep(10);
        }
        Ackwheel.TimeoutBatch batch = client.nextBatch(Duration.ofSeconds(5));
        int waiting = client.nextBatch(Duration.ZERO) == null ? 1 : 2;
        client.batchAck(List.of(batch.id())).join();
        client.close();
        client.close();
        System.out.printf("{\"lost\":%d,\"waiting\":%d,\"attempt\":%d}%n", lost, waiting, batch.attempts()[0]);
    }

    private static void failWithoutServer() throws IOException {
        int port;
        try (ServerSocket nobody = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
            port = nobody.getLocalPort();
        }
        try {
            Ackwheel.connect(new Ackwheel.Options("127.0.0.1", port, "", "Manners", "nobody", 10, true));
            fail("nobody listens there");
        } catch (Ackwheel.Failure failure) {
            if (!failure.retryable || failure.outcomeUnknown) {
                fail(failure.toString());
            }
        }
    }

    /** The lock is free for the callback only after a second request, which must not wait for the callback. */
    private static int askUnderLock(Ackwheel client) throws InterruptedException {
        Object session = new Object();
        CountDownLatch completed = new CountDownLatch(1);
        CompletableFuture<?> first, second;
        synchronized (session) {
            first = client.delMsg(UNKNOWN, false).whenComplete((outcomes, failure) -> {
                completed.countDown();
                synchronized (session) { }
            });
            completed.await();
            second = client.delMsg(UNKNOWN, false);
        }
        return untilItSucceeds(client, first) + untilItSucceeds(client, second);
    }

    /** Repeats a request until it succeeds; answers how many of them were lost with their connection. */
    private static int untilItSucceeds(Ackwheel client, CompletableFuture<?> asked) throws InterruptedException {
        for (int lost = 0; ; asked = client.delMsg(UNKNOWN, false)) {
            try {
                asked.join();
                return lost;
            } catch (CompletionException error) {
                if (!(error.getCause() instanceof Ackwheel.Failure failure) || !failure.retryable) {
                    throw error;
                }
                lost += failure.outcomeUnknown ? 1 : 0;
                Thread.sleep(10);
            }
        }
    }

    private static void mustRefuse(Runnable request) {
        try {
            request.run();
            fail("it should be refused");
        } catch (IllegalArgumentException refused) {
            if (!refused.getMessage().contains("must be from 0 to")) {
                fail(refused.toString());
            }
        }
    }

    private static void fail(String why) {
        System.err.println(why);
        System.exit(1);
    }
}
