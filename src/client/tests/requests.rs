//! Tests requests and their answers on a healthy connection.

use super::*;

#[tokio::test]
async fn every_request_is_asked_as_the_protocol_says_and_answered() {
    let peer = Peer::new().await;
    let options = ClientOptions::default().token("secret").client_name("node-7");
    let (client, session) = tokio::join!(Client::connect(peer.address(), options), async {
        let mut session = peer.accept().await;
        let hello = session.hello().await;
        assert_eq!((hello.token.0.as_slice(), hello.client_name.as_str()), (&b"secret"[..], "node-7"));
        session.send(1, Body::Welcome(welcome())).await;
        session
    });
    let (client, mut session) = (client.unwrap(), session);
    assert_eq!(client.welcome(), welcome());

    let options = AddOptions::default().ack_timeout_ticks(5).attempt(2);
    let two = messages(2);
    let (answer, asked) = tokio::join!(client.add_new_msg(&two, options), session.answer(added(2)));
    assert_eq!(Body::AddNewMsgAnswer(answer.unwrap()), added(2));
    assert_eq!(asked, Body::AddNewMsg { messages: two.clone(), ack_timeout_ticks: 5, attempt: 2 });

    let (answer, asked) = tokio::join!(client.del_msg(&two), session.answer(acked(2)));
    assert_eq!(answer.unwrap(), [DelOutcome::Acked; 2]);
    assert_eq!(asked, Body::DelMsg { messages: two.clone(), withdraw: false });

    let withdrawn = Body::DelMsgAnswer(vec![DelOutcome::Withdrawn, DelOutcome::Unknown]);
    let (answer, asked) = tokio::join!(client.withdraw(&two), session.answer(withdrawn));
    assert_eq!(answer.unwrap(), [DelOutcome::Withdrawn, DelOutcome::Unknown]);
    assert_eq!(asked, Body::DelMsg { messages: two, withdraw: true });

    let (answer, ()) = tokio::join!(client.ping(b"alive?"), session.pong());
    answer.unwrap();

    let (answer, asked) = tokio::join!(client.group_delete("audit"), session.answer(Body::GroupDeleteAnswer));
    answer.unwrap();
    assert_eq!(asked, Body::GroupDelete("audit".to_owned()));
}

#[tokio::test]
async fn a_unix_socket_is_an_address_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ackwheel.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let address = format!("unix:{}", path.display()).parse().unwrap();
    let (client, _stream) = tokio::join!(Client::connect(address, ClientOptions::default()), async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut out = BytesMut::new();
        Codec::default().encode_frame(&Frame::new(1, Body::Welcome(welcome())), &mut out);
        stream.write_all(&out).await.unwrap();
        stream
    });
    assert_eq!(client.unwrap().welcome().server_name, "peer");
}

#[tokio::test]
async fn calls_are_written_in_their_order_and_their_answers_may_come_in_any_order() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let calls = async {
        let one = messages(1);
        tokio::join!(
            client.add_new_msg(&one, AddOptions::default()),
            client.del_msg(&one),
            client.group_delete("a"),
            client.ping(b"1")
        )
    };
    let script = async {
        let first = session.frame().await;
        let in_the_same_read = session.input.len();
        let frames = [first, session.frame().await, session.frame().await, session.frame().await];
        let types = frames.each_ref().map(|frame| frame.body.frame_type().as_str());
        assert_eq!(types, ["add_new_msg", "del_msg", "group_delete", "ping"]);
        assert!(in_the_same_read > 0 && session.input.is_empty(), "all requests come in one write");
        let answers = [added(1), acked(1), Body::GroupDeleteAnswer, Body::Pong(b"1".to_vec())];
        for (frame, answer) in frames.into_iter().zip(answers).rev() {
            session.send(frame.correlation, answer).await;
        }
    };
    let ((add, del, delete, ping), ()) = tokio::join!(calls, script);
    assert_eq!(add.unwrap().deadline, Tick(115));
    assert_eq!(del.unwrap(), [DelOutcome::Acked]);
    delete.unwrap();
    ping.unwrap();
}

#[tokio::test]
async fn long_slices_are_split_by_the_server_s_limits_and_their_answers_put_together() {
    let peer = Peer::new().await;
    let short = Welcome { max_messages: 10, ..welcome() };
    let (client, mut session) = peer.connect_with(ClientOptions::default(), short).await;
    let all = messages(25);
    let script = async {
        let mut asked = Vec::new();
        let mut correlations = Vec::new();
        for length in [10, 10, 5] {
            let Frame { correlation, body: Body::AddNewMsg { messages, .. } } = session.frame().await else {
                panic!()
            };
            assert_eq!(messages.len(), length);
            asked.extend(messages);
            correlations.push(correlation);
        }
        assert_eq!(asked, all, "the client sends all frames in order, before the first answer");
        let outcome = [AddOutcome::Added, AddOutcome::Rearmed, AddOutcome::Added];
        for (position, count) in [(2, 5), (0, 10), (1, 10)] {
            let deadline = Tick(100 + position as u64);
            let answer = AddNewMsgAnswer { deadline, outcomes: vec![outcome[position]; count] };
            session.send(correlations[position], Body::AddNewMsgAnswer(answer)).await;
        }
    };
    let (answer, ()) = tokio::join!(client.add_new_msg(&all, AddOptions::default()), script);
    let answer = answer.unwrap();
    assert_eq!(answer.deadline, Tick(102), "the call returns the latest deadline");
    let rearmed: Vec<usize> =
        (0..25).filter(|position| answer.outcomes[*position] == AddOutcome::Rearmed).collect();
    assert_eq!(rearmed, (10..20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_request_that_fails_in_part_has_an_unknown_outcome() {
    let peer = Peer::new().await;
    let short = Welcome { max_messages: 10, ..welcome() };
    let (client, mut session) = peer.connect_with(ClientOptions::default(), short).await;
    let all = messages(25);
    let script = async {
        session.answer(acked(10)).await;
        session.answer(refusal(Reason::MaxHeldAcks)).await;
        session.answer(acked(5)).await;
    };
    let (answer, ()) = tokio::join!(client.del_msg(&all), script);
    let error = assert_outcome_unknown(answer);
    assert!(error.is_retryable() && error.reason() == Some(Reason::MaxHeldAcks), "{error:?}");
    assert!(matches!(error, ClientError::Partial { applied: 15, messages: 25, .. }), "{error:?}");
}

#[tokio::test]
async fn what_cannot_be_asked_is_not_sent() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    assert_eq!(client.add_new_msg(&[], AddOptions::default()).await.unwrap().outcomes, []);
    assert_eq!(client.del_msg(&[]).await.unwrap(), []);
    assert_eq!(client.withdraw(&[]).await.unwrap(), []);
    let zero = AddOptions { ack_timeout_ticks: Some(0), attempt: 1 };
    let one = messages(1);
    assert_not_applied(client.add_new_msg(&one, zero).await);
    let error = assert_not_applied(client.ping(&[0; 65]).await);
    assert!(matches!(&error, ClientError::InvalidRequest(text) if text.contains("at most 64")), "{error}");
    assert_not_applied(client.group_delete(&"x".repeat(256)).await);
    let long = ClientOptions::default().token(vec![0; 1_025]);
    assert_not_applied(Client::connect(peer.address(), long).await);
    // This Ping is the first request that the peer receives.
    let (answer, ()) = tokio::join!(client.ping(&[0; 64]), session.pong());
    answer.unwrap();
}

#[tokio::test]
async fn a_refusal_is_passed_on_and_the_connection_goes_on() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let one = messages(1);
    let (answer, _) =
        tokio::join!(client.add_new_msg(&one, AddOptions::default()), session.answer(refusal(Reason::Draining)));
    let error = assert_not_applied(answer);
    assert!(error.is_retryable(), "{error}");
    assert_eq!(error.to_string(), "the server refused: because (draining)");
    let (answer, _) = tokio::join!(client.del_msg(&one), session.answer(refusal(Reason::StoreTimeout)));
    assert_outcome_unknown(answer);
    let (answer, ()) = tokio::join!(client.ping(b""), session.pong());
    answer.unwrap();
}

#[tokio::test]
async fn a_call_that_is_dropped_before_it_is_written_is_not_sent() {
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    {
        let dropped = client.group_delete("dropped");
        tokio::pin!(dropped);
        assert!(futures_util::poll!(dropped.as_mut()).is_pending());
    }
    let (answer, ()) = tokio::join!(client.ping(b"next"), session.pong());
    answer.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_share_a_connection() {
    const TASKS: u64 = 64;
    const CALLS: u64 = 100;
    let peer = Peer::new().await;
    let (client, mut session) = peer.connect().await;
    let server = tokio::spawn(async move {
        let mut held = None;
        while let Some(Frame { correlation, body }) = session.read().await {
            let Body::DelMsg { messages, .. } = body else { continue };
            // The outcome depends on the message id, and every second answer is delayed.
            let outcome = DelOutcome::ALL[(messages[0].msg_id.0 % 4) as usize];
            let answer = (correlation, Body::DelMsgAnswer(vec![outcome]));
            match held.take() {
                None => held = Some(answer),
                Some((earlier, earlier_answer)) => {
                    session.send(answer.0, answer.1).await;
                    session.send(earlier, earlier_answer).await;
                }
            }
        }
    });
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for call in 0..CALLS {
                    let msg_id = task * 7 + call;
                    let (a, b) = ([Message::new(msg_id, task)], [Message::new(msg_id + 1, task)]);
                    let (a, b) = tokio::join!(client.del_msg(&a), client.del_msg(&b));
                    let outcomes = [a.unwrap()[0], b.unwrap()[0]];
                    assert_eq!(outcomes, [0, 1].map(|next| DelOutcome::ALL[((msg_id + next) % 4) as usize]));
                }
            })
        })
        .collect();
    drop(client);
    for task in tasks {
        task.await.unwrap();
    }
    server.await.unwrap();
}

#[test]
fn clients_errors_and_batches_can_be_shared_between_threads() {
    fn shared<T: Clone + Send + Sync + 'static>() {}
    fn sent<T: Send + 'static>() {}
    shared::<Client>();
    shared::<ClientError>();
    shared::<Delivered>();
    sent::<Subscription>();
}
