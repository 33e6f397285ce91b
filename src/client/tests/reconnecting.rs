//! Tests how connections are opened, restored and closed.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn who_cannot_connect_is_told_where_and_why() {
    let peer = Peer::new().await;
    let address = peer.address();
    drop(peer);
    let error = assert_not_applied(Client::connect(address.clone(), ClientOptions::default()).await);
    assert!(matches!(error, ClientError::Connect { .. }) && error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn who_is_refused_at_hello_is_told_so() {
    let peer = Peer::new().await;
    let (error, ()) = tokio::join!(Client::connect(peer.address(), ClientOptions::default()), async {
        let mut session = peer.accept().await;
        session.hello().await;
        session.send(1, refusal(Reason::Unauthorized)).await;
    });
    let error = assert_not_applied(error);
    assert!(error.reason() == Some(Reason::Unauthorized) && !error.is_retryable(), "{error:?}");
    let (error, ()) = tokio::join!(Client::connect(peer.address(), ClientOptions::default()), async {
        let mut session = peer.accept().await;
        session.send(0, refusal(Reason::TooManyConnections)).await;
    });
    assert_eq!(assert_not_applied(error).reason(), Some(Reason::TooManyConnections));
    let (error, ()) = tokio::join!(Client::connect(peer.address(), ClientOptions::default()), async {
        peer.greet(Welcome { version: 9, ..welcome() }).await;
    });
    assert!(assert_not_applied(error).to_string().contains("version 9"));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_accepts_and_says_nothing_is_not_waited_for_for_ever() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let address = peer.address();
    let call = start(Client::connect(address, ClientOptions::default())).await;
    let _session = peer.accept().await;
    clock.pass(SECOND * 5).await;
    let error = assert_not_applied(call.await.unwrap());
    assert!(error.to_string().contains("did not answer within 5s"), "{error}");
}

#[tokio::test]
async fn requests_wait_for_the_next_connection_and_keep_their_order() {
    let peer = Peer::new().await;
    let (client, session) = peer.connect().await;
    assert!(client.outage().is_none());
    drop(session);
    // By now the client has noticed the loss, and the next connection is not ready yet.
    let mut session = peer.accept().await;
    assert_eq!(&*client.outage().unwrap().cause, "the server closed the connection");
    let calls = async { tokio::join!(client.group_delete("a"), client.ping(b"b")) };
    let ((delete, ping), ()) = tokio::join!(calls, async {
        session.hello().await;
        session.send(1, Body::Welcome(Welcome { server_name: "another".to_owned(), ..welcome() })).await;
        assert_eq!(session.answer(Body::GroupDeleteAnswer).await, Body::GroupDelete("a".to_owned()));
        session.pong().await;
    });
    delete.unwrap();
    ping.unwrap();
    assert_eq!(client.welcome().server_name, "another");
    assert!(client.outage().is_none());
}

#[tokio::test(start_paused = true)]
async fn requests_do_not_wait_for_longer_than_they_may() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, session) = peer.connect_with(ClientOptions::default(), welcome()).await;
    let address = peer.address();
    drop(session);
    let session = clock.until(peer.accept()).await;
    drop((peer, session));
    let call = start({
        let client = client.clone();
        async move { client.group_delete("a").await }
    })
    .await;
    clock.pass(SECOND * 4).await;
    assert!(!call.is_finished());
    clock.pass(SECOND * 2).await;
    let error = assert_not_applied(call.await.unwrap());
    assert!(matches!(error, ClientError::NotConnected { .. }) && error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    // The background task tries to connect until no caller is left.
    let alive = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    drop(client);
    settle().await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), alive - 1);
}

#[tokio::test(start_paused = true)]
async fn a_refused_connection_fails_who_waits_and_is_not_tried_again_fast() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, session) = peer.connect_with(ClientOptions::default(), welcome()).await;
    drop(session);
    let mut session = clock.until(peer.accept()).await;
    let waiting = start({
        let client = client.clone();
        async move { client.group_delete("a").await }
    })
    .await;
    session.hello().await;
    session.send(1, refusal(Reason::Unauthorized)).await;
    drop(session);
    assert_eq!(assert_not_applied(waiting.await.unwrap()).reason(), Some(Reason::Unauthorized));
    clock.pass(SECOND * 9 / 10).await;
    assert!(futures_util::poll!(std::pin::pin!(peer.accept())).is_pending(), "it waits half of the longest pause");
    let mut session = clock.until(peer.greet(welcome())).await;
    let (answer, ()) = tokio::join!(client.ping(b"healed"), session.pong());
    answer.unwrap();
}

#[tokio::test]
async fn a_server_that_goes_away_is_used_until_it_closes() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    session.send(0, Body::GoAway { reason: GoAwayReason::Draining, grace_ms: 10_000 }).await;
    let (delete, mut session) = tokio::join!(client.group_delete("a"), async {
        let request = session.frame().await;
        let (ping, ()) = tokio::join!(client.ping(b"new"), session.pong());
        ping.unwrap();
        session.send(request.correlation, Body::GroupDeleteAnswer).await;
        drop(session);
        peer.greet(welcome()).await
    });
    delete.unwrap();
    let (answer, ()) = tokio::join!(client.ping(b"elsewhere"), session.pong());
    answer.unwrap();
}

#[tokio::test]
async fn the_last_clone_says_goodbye_and_leaves_nothing_behind() {
    let peer = Peer::new().await;
    let (client, session) = peer.connect().await;
    let clone = client.clone();
    drop(client);
    let metrics = tokio::runtime::Handle::current().metrics();
    settle().await;
    assert_eq!(metrics.num_alive_tasks(), 1, "a clone needs the connection");
    drop(clone);
    session.expect_goodbye().await;
    while metrics.num_alive_tasks() > 0 {
        tokio::task::yield_now().await;
    }
}
