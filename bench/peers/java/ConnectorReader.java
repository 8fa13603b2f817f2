import com.sun.management.OperatingSystemMXBean;
import io.nats.client.Connection;
import io.nats.client.JetStreamSubscription;
import io.nats.client.Message;
import io.nats.client.Nats;
import io.nats.client.PullSubscribeOptions;
import io.nats.client.impl.NatsJetStreamMetaData;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Reads a durable pull consumer in the way of the JVM's Spark connector, without Spark: threads fetch batches, make a row
 * of twelve values from each message, and publish an ack for each when the batch is done.
 */
public final class ConnectorReader {
  private static final byte[] ACK = "+ACK".getBytes(StandardCharsets.US_ASCII);
  private static final Duration MAX_WAIT = Duration.ofSeconds(2);

  private ConnectorReader() {}

  public static void main(String[] arguments) throws Exception {
    String url = arguments[0];
    String stream = arguments[1];
    String consumer = arguments[2];
    long count = Long.parseLong(arguments[3]);
    int threads = Integer.parseInt(arguments[4]);
    int batch = Integer.parseInt(arguments[5]);
    AtomicLong seen = new AtomicLong();
    CountDownLatch connected = new CountDownLatch(threads);
    CountDownLatch start = new CountDownLatch(1);
    List<Thread> readers = new ArrayList<>();
    for (int number = 0; number < threads; number++) {
      Thread reader =
          new Thread(
              () -> {
                try (Connection connection = Nats.connect(url)) {
                  JetStreamSubscription subscription =
                      connection.jetStream().subscribe(null, PullSubscribeOptions.fastBind(stream, consumer));
                  connected.countDown();
                  start.await();
                  while (seen.get() < count) {
                    seen.addAndGet(readBatch(connection, subscription, batch));
                  }
                  connection.flush(MAX_WAIT);
                } catch (Exception error) {
                  error.printStackTrace();
                  System.exit(1);
                }
              });
      reader.start();
      readers.add(reader);
    }
    connected.await();
    OperatingSystemMXBean system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    long cpu = system.getProcessCpuTime();
    long begun = System.nanoTime();
    start.countDown();
    for (Thread reader : readers) {
      reader.join();
    }
    System.out.printf(
        "{\"count\": %d, \"seconds\": %.6f, \"cpu_seconds\": %.6f}%n",
        seen.get(), (System.nanoTime() - begun) / 1e9, (system.getProcessCpuTime() - cpu) / 1e9);
  }

  private static int readBatch(Connection connection, JetStreamSubscription subscription, int batch) {
    List<Message> messages = subscription.fetch(batch, MAX_WAIT);
    List<Object[]> rows = new ArrayList<>(messages.size());
    for (Message message : messages) {
      NatsJetStreamMetaData about = message.metaData();
      rows.add(
          new Object[] {
            message.getSubject(),
            message.getReplyTo(),
            message.getData(),
            message.getHeaders(),
            about.getDomain(),
            about.getStream(),
            about.getConsumer(),
            about.deliveredCount(),
            about.streamSequence(),
            about.consumerSequence(),
            about.timestamp().toInstant().toEpochMilli() * 1000,
            about.pendingCount()
          });
    }
    for (Object[] row : rows) {
      connection.publish((String) row[1], ACK);
    }
    return rows.size();
  }
}
