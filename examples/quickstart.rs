//! The first look: three messages are pushed, one is acknowledged, the others time out.
//!
//! The sidecar runs inside this program, with a tick of 100 ms, so all is over after two seconds. A logic
//! node connects to one that runs beside it (`ackwheel serve`), and the rest is the same.
//!
//! ```text
//! cargo run --example quickstart
//! ```

use std::time::Duration;

use ackwheel::app::Sidecar;
use ackwheel::client::{AddOptions, Client, ClientOptions, SubscribeOptions};
use ackwheel::config::Settings;
use ackwheel::core::Message;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let free_port = Some("127.0.0.1:0".to_owned());
    let tick = Some(Duration::from_millis(100));
    let settings = Settings { listen: free_port.clone(), admin: free_port, tick, ..Settings::default() };
    let sidecar = Sidecar::start(settings.check()?).await?;
    println!("a sidecar listens on {}", sidecar.address);
    let client = Client::connect(sidecar.address.into(), ClientOptions::default()).await?;
    let mut timeouts = client.subscribe(SubscribeOptions::default().group("default")).await?;

    // Message 101 goes to two phones, 7 and 8, and 102 to phone 9. Add before you push.
    let messages = [Message::new(101, 7), Message::new(101, 8), Message::new(102, 9)];
    let added = client.add_new_msg(&messages, AddOptions::default()).await?;
    println!("added 101:7 101:8 102:9, which may stay in flight to the end of tick {}", added.deadline);

    // Phone 7 answers.
    let outcomes = client.del_msg(&messages[..1]).await?;
    println!("deleted 101:7, which is {}", outcomes[0]);

    // One revolution later: the messages that phones 8 and 9 did not acknowledge. docs/INTEGRATION.md says how to judge
    // whether a phone is offline.
    println!("waiting for those that are never acknowledged …");
    if let Some(batch) = timeouts.next().await.transpose()? {
        let silent: Vec<String> = batch.messages.iter().map(|timed_out| timed_out.message.to_string()).collect();
        println!("timed out in tick {}: {}", batch.id.tick, silent.join(" "));
        // Acknowledge a batch when it is dealt with: until then it comes again. So an error here is none to end for.
        match batch.ack().await {
            Ok(settled) => println!("acknowledged the batch: {settled}"),
            Err(error) => println!("batch {} is not settled yet: {error}", batch.id),
        }
    }
    sidecar.drain().await?;
    Ok(())
}
