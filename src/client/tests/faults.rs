//! Tests faults of a server or a network, and stalls of this process.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_request_whose_connection_is_lost_has_an_unknown_outcome() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let (answer, ()) = tokio::join!(client.group_delete("a"), async {
        session.frame().await;
        drop(session);
    });
    let error = assert_outcome_unknown(answer);
    assert!(matches!(error, ClientError::ConnectionLost { .. }) && error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains(&peer.address().to_string()), "{error}");
}

#[tokio::test]
async fn the_last_word_of_the_server_says_why_the_connection_was_lost() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let (answer, ()) = tokio::join!(client.group_delete("a"), async {
        session.frame().await;
        session.send(0, refusal(Reason::SlowReader)).await;
        drop(session);
    });
    let error = assert_outcome_unknown(answer).to_string();
    assert!(error.contains("the server said: because; the server closed the connection"), "{error}");
}

#[tokio::test]
async fn bytes_that_are_no_frames_and_answers_that_are_none_end_the_connection() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    for nonsense in [&b"\xff\xff\xff\xff"[..], b"\0\0\0\x04", b"\0\0\0\x09\x91\0\0\0\0\0\0\x03\0"] {
        let (answer, next) = tokio::join!(client.group_delete("a"), async {
            session.frame().await;
            session.stream.write_all(nonsense).await.unwrap();
            peer.greet(welcome()).await
        });
        let error = assert_outcome_unknown(answer);
        assert!(!matches!(error, ClientError::Timeout { .. }), "{nonsense:?}: {error}");
        session = next;
    }
    let (answer, next) = tokio::join!(client.group_delete("a"), async {
        session.answer(Body::Pong(Vec::new())).await;
        peer.greet(welcome()).await
    });
    session = next;
    let error = assert_outcome_unknown(answer);
    assert!(matches!(&error, ClientError::Protocol(text) if text.contains("group_delete")), "{error:?}");
    let one = messages(1);
    let (answer, _) = tokio::join!(client.del_msg(&one), session.answer(acked(2)));
    assert!(matches!(assert_outcome_unknown(answer), ClientError::Protocol(_)));
}

#[tokio::test]
async fn unknown_types_and_unasked_pongs_are_ignored_and_pings_answered() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    session.stream.write_all(b"\0\0\0\x08\x7f\0\0\0\0\0\0\0").await.unwrap();
    session.send(0, Body::Pong(b"nobody asked".to_vec())).await;
    session.send(0, Body::Ping(b"alive?".to_vec())).await;
    assert_eq!(session.frame().await, Frame::new(0, Body::Pong(b"alive?".to_vec())));
    let (answer, ()) = tokio::join!(client.ping(b"yes"), session.pong());
    answer.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_too_late_is_ignored() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let call = start({
        let client = client.clone();
        async move { client.group_delete("a").await }
    })
    .await;
    let late = session.frame().await;
    clock.pass(SECOND * 5).await;
    let error = assert_outcome_unknown(call.await.unwrap());
    assert!(matches!(error, ClientError::Timeout { written: true, .. }), "{error:?}");
    session.pong().await;
    session.send(late.correlation, Body::GroupDeleteAnswer).await;
    let (answer, ()) = tokio::join!(client.ping(b"goes on"), session.pong());
    answer.unwrap();
}

#[tokio::test(start_paused = true)]
async fn requests_that_a_server_does_not_read_wait_within_bounds_and_then_fail() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, _session) = peer.connect().await;
    // 40 MB: some of the requests are in the sockets' buffers, some wait to be written, and the last find no room.
    let many = Arc::new(messages(32_768));
    let mut calls = Vec::new();
    for _ in 0..80 {
        let (client, many) = (client.clone(), Arc::clone(&many));
        calls.push(start(async move { client.del_msg(&many).await }).await);
    }
    clock.pass(SECOND * 5).await;
    let mut written = Vec::new();
    for call in calls {
        let error = call.await.unwrap().unwrap_err();
        let ClientError::Timeout { written: may_be_applied, .. } = error else { panic!("{error:?}") };
        assert_eq!(may_be_applied, error.promise() == Promise::OutcomeUnknown);
        written.push(may_be_applied);
    }
    assert!(written[0] && !written[79], "{written:?}");
    assert!(written.is_sorted_by(|earlier, later| earlier >= later), "requests are written in order: {written:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_asked_and_then_given_up() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let options = ClientOptions::default().request_timeout(SECOND * 60);
    let (client, mut session) = peer.connect_with(options, welcome()).await;
    clock.pass(SECOND * 5).await;
    session.pong().await;
    settle().await;
    let call = start(async move { client.group_delete("a").await }).await;
    assert_eq!(session.frame().await.body, Body::GroupDelete("a".to_owned()));
    clock.pass(SECOND * 9).await;
    assert_eq!(session.frame().await.body, Body::Ping(Vec::new()));
    assert!(!call.is_finished(), "two intervals have not passed yet");
    clock.pass(SECOND * 2).await;
    let error = assert_outcome_unknown(call.await.unwrap());
    assert!(error.to_string().contains("nothing was heard of the server"), "{error}");
    assert_eq!(session.read().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_stall_of_our_own_is_no_silence_of_the_server() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    clock.pass(SECOND * 6).await;
    // The answer to this Ping lies in the socket while the process is stalled.
    session.pong().await;
    clock.stall(SECOND * 3_600).await;
    clock.pass(SECOND).await;
    // The server could not answer during the stall either, as the whole test process was stalled. So the client pings
    // it again.
    clock.stall(SECOND * 3_600).await;
    clock.pass(SECOND * 4).await;
    session.pong().await;
    let (answer, ()) = tokio::join!(client.group_delete("still here"), async {
        let request = session.request().await;
        session.send(request, Body::GroupDeleteAnswer).await;
    });
    answer.unwrap();
}

#[tokio::test(start_paused = true)]
async fn answers_are_read_before_anybody_is_judged_late() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    // Try this several times, because the task looks at the socket or at the clock first, at random.
    for _ in 0..10 {
        for (before, then) in [(SECOND * 49 / 10, SECOND / 8), (Duration::ZERO, SECOND * 3_600)] {
            let client = client.clone();
            let call = start(async move { client.group_delete("a").await }).await;
            let request = session.request().await;
            clock.pass(before).await;
            // The clock jumps over the deadline before the client can read the answer.
            session.send(request, Body::GroupDeleteAnswer).await;
            clock.stall(then).await;
            call.await.unwrap().unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_a_stall_held_up_may_come_a_moment_after_it() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let call = start(async move { client.group_delete("a").await }).await;
    let request = session.request().await;
    clock.stall(SECOND * 3_600).await;
    session.send(request, Body::GroupDeleteAnswer).await;
    settle().await;
    call.await.unwrap().unwrap();
}

impl Session {
    /// Returns the correlation id of the next request other than a Ping. Answers Pings.
    async fn request(&mut self) -> u32 {
        loop {
            match self.frame().await {
                Frame { correlation, body: Body::Ping(payload) } => {
                    self.send(correlation, Body::Pong(payload)).await;
                }
                frame => return frame.correlation,
            }
        }
    }
}
