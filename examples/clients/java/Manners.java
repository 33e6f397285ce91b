import java.io.IOException;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HexFormat;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CountDownLatch;
import java.util.stream.Stream;

/**
 * What the scenario does not show: java Manners ADDR GROUP GATE
 *
 * <p>Asks while it holds a lock that the callbacks want too, closes at odd moments, names what is no sidecar, and is
 * slow with its batches until the file GATE is there: then one copy waits, the last. Prints a line of
 * JSON; exits with 1 and says why if something is wrong.
 */
public final class Manners {
    private static final List<Ackwheel.Message> UNKNOWN = List.of(new Ackwheel.Message(1, 0));
    /** Version 1, 15 slots of 1 s, the usual limits, and a ping interval of 5 s; neither a store nor a name. */
    private static final byte[] WELCOME = HexFormat.of().parseHex(
            "000000228100000000000001" + "0100000f000003e80010000000008000000f4240000013880000");
    /** What was read is no frame, so it has no correlation id: malformed_frame, "no". */
    private static final byte[] NO_FRAME = HexFormat.of().parseHex("0000000aff000001000000006e6f");

    public static void main(String[] arguments) throws IOException, InterruptedException {
        // Each of these waits for as long as a client does, so they wait together.
        List<CompletableFuture<Void>> waits = Stream.<Runnable>of(
                () -> mustNotConnect(unused(), ""),
                () -> mustNotConnect(served("HTTP/1.1 400 Bad Request\r\n\r\n".getBytes()), "HTTP"),
                () -> mustNotConnect(served(HexFormat.of().parseHex("15030300020246")), "TLS"),
                Manners::closeWhileAnAckIsHeld,
                Manners::connectAnewAfterAWrongFrame
        ).map(check -> CompletableFuture.runAsync(check, task -> new Thread(task).start())).toList();
        waits.forEach(CompletableFuture::join);
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
        loseTheAckOf(client, batch);
        client.close();
        client.close();
        System.out.printf("{\"lost\":%d,\"waiting\":%d,\"delivery\":%d,\"attempt\":%d}%n", lost, waiting,
                batch.deliveryCount(), batch.attempts()[0]);
    }

    /** The client repeats it by itself, and hands the batch out no more. (Its consumer need not know of the loss.) */
    private static void loseTheAckOf(Ackwheel client, Ackwheel.TimeoutBatch batch) throws InterruptedException {
        try {
            client.batchAck(List.of(batch.id())).join();
            fail("its connection should be cut");
        } catch (CompletionException error) {
            if (!(error.getCause() instanceof Ackwheel.Failure failure) || !failure.outcomeUnknown) {
                throw error;
            }
        }
        if (client.nextBatch(Duration.ofSeconds(2)) != null) {
            fail("what was acknowledged is handed out again");
        }
    }

    private static int unused() {
        try (ServerSocket nobody = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
            return nobody.getLocalPort();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Has every connection answered with these bytes, and kept until the client is gone. */
    private static int served(byte[] answer) {
        try {
            ServerSocket server = new ServerSocket(0, 10, InetAddress.getLoopbackAddress());
            Thread thread = new Thread(() -> {
                while (true) {
                    try (Socket connection = server.accept()) {
                        connection.getOutputStream().write(answer);
                        connection.getInputStream().transferTo(OutputStream.nullOutputStream());
                    } catch (IOException gone) { /* The next one, please. */ }
                }
            });
            thread.setDaemon(true);
            thread.start();
            return server.getLocalPort();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static Ackwheel.Options without(int port) {
        return new Ackwheel.Options("127.0.0.1", port, "", "Manners", "", 10, true);
    }

    private static void mustNotConnect(int port, String named) {
        try {
            Ackwheel.connect(without(port));
            fail("there is no sidecar");
        } catch (Ackwheel.Failure failure) {
            if (!failure.retryable || failure.outcomeUnknown || !failure.getMessage().contains(named)) {
                fail(failure.toString());
            }
        }
    }

    /** A server that holds an Ack is waited for, but not for ever: then nobody knows what became of it. */
    private static void closeWhileAnAckIsHeld() {
        Ackwheel client = Ackwheel.connect(without(served(WELCOME)));
        CompletableFuture<?> held = client.delMsg(UNKNOWN, false);
        client.close();
        try {
            held.getNow(null);
            fail("it should have ended");
        } catch (CompletionException error) {
            if (!(error.getCause() instanceof Ackwheel.Failure failure) || !failure.outcomeUnknown) {
                fail(error.toString());
            }
        }
    }

    /** What ends a connection that was welcomed does not end the client. */
    private static void connectAnewAfterAWrongFrame() {
        try (ServerSocket server = new ServerSocket(0, 10, InetAddress.getLoopbackAddress())) {
            server.setSoTimeout(10_000);
            CompletableFuture<Ackwheel> client =
                    CompletableFuture.supplyAsync(() -> Ackwheel.connect(without(server.getLocalPort())));
            try (Socket first = server.accept()) {
                first.getOutputStream().write(WELCOME);
                first.getOutputStream().write(NO_FRAME);
                server.accept().close();
            }
            client.join().close();
        } catch (IOException error) {
            fail(error.toString());
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
