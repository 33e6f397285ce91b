//! TLS on the data listener: only whom the client trusts, nothing in the clear, and renewal without a restart.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::support::certificates::{Authority, Files, YEAR_1999, YEAR_2000, YEAR_2500, YEAR_3000};
use crate::support::frames::{self, ACKED};
use crate::support::process::{Run, assert_names, program};
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sidecar::{self, Sidecar};
use crate::support::watch::Watch;
use crate::support::{SLACK, wait_until};

fn serve(files: &Files) -> Sidecar {
    let mut flags = vec!["--tick", "50ms"];
    flags.extend(files.flags());
    Sidecar::start(&flags)
}

fn add(sidecar: &Sidecar, flags: &[&str]) -> Run {
    let mut arguments = vec!["add", "--timeout", "5s"];
    arguments.extend(flags);
    arguments.push("101");
    sidecar.run(&arguments)
}

#[test]
fn messages_and_batches_travel_encrypted_to_whom_the_client_trusts() {
    let (files, authority) = (Files::new(), Authority::new());
    authority.certify(&files, 0);
    let trusted = files.authority("ca.pem", &authority);
    let other = files.authority("other.pem", &Authority::new());
    let sidecar = serve(&files);

    let trusted = ["--tls-ca", trusted.to_str().unwrap()];
    let watch = Watch::start(&sidecar, &["--group", "default", trusted[0], trusted[1]]);
    assert_eq!(add(&sidecar, &trusted).output(), "101 added, times out in 750ms\n");
    assert_eq!(watch.next().plain_ids(), [101]);

    assert_names(sidecar.run(&["ping", trusted[0], trusted[1]]).output(), &["answered in"]);
    sidecar.run(&["ping", "--tls-ca", other.to_str().unwrap()]).error(1);
    let untrusted = add(&sidecar, &["--tls-ca", other.to_str().unwrap()]);
    assert_names(untrusted.error(1), &["certificate", "no trusted authority signed it"]);
    assert!(!untrusted.error(1).contains("is ackwheel serving there"), "it is");
    add(&sidecar, &[]).error(1);
    assert!(sidecar.metrics().refusals("tls_handshake") >= 2, "a wrong trust and a plain client");
}

#[test]
fn a_certificate_that_vouches_for_itself_is_trusted_if_it_is_none_of_an_authority() {
    for (is_ca, error) in
        [(IsCa::ExplicitNoCa, None), (IsCa::Ca(BasicConstraints::Unconstrained), Some("CA:FALSE"))]
    {
        let files = Files::new();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![String::from("127.0.0.1")]).unwrap();
        params.is_ca = is_ca;
        fs::write(&files.certificate, params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        let added = add(&serve(&files), &["--tls-ca", files.certificate.to_str().unwrap()]);
        match error {
            None => assert_eq!(added.output(), "101 added, times out in 750ms\n"),
            Some(words) => assert_names(added.error(1), &["certificate", words]),
        }
    }
}

#[test]
fn a_large_answer_and_large_batches_are_not_held_back() {
    let (files, trusted) = Files::vouched_for();
    let sidecar = serve(&files);
    let watch = Watch::start(&sidecar, &["--group", "default", "--tls-ca", trusted.to_str().unwrap()]);
    let ids: Vec<String> = (1_000_000..1_010_000).map(|id: u64| id.to_string()).collect();
    let mut arguments = vec!["add", "--tls-ca", trusted.to_str().unwrap()];
    arguments.extend(ids.iter().map(String::as_str));
    assert_eq!(sidecar.run(&arguments).output().lines().count(), ids.len());
    let received: usize = watch.take(3).iter().map(|line| line.plain_ids().len()).sum();
    assert_eq!(received, ids.len());
}

#[test]
fn a_load_travels_encrypted_too() {
    let (files, trusted) = Files::vouched_for();
    let sidecar = Sidecar::start(&files.flags());
    let trust = ["bench", "--tls-ca", trusted.to_str().unwrap(), "--admin", &sidecar.admin.to_string()];
    for load in [["--ids-per-frame", "1"], ["--ids-per-frame", "2000"]] {
        let run = sidecar.run(&[&trust[..], &["--seconds", "0.3", "--in-flight", "50000"], &load].concat());
        assert_names(run.output(), &["pairs per second", "errors"]);
    }
}

#[test]
fn a_renewed_certificate_is_used_without_a_restart_and_a_broken_one_is_not() {
    let (files, first, second) = (Files::new(), Authority::new(), Authority::new());
    first.certify(&files, 0);
    let (first_pem, second_pem) = (files.authority("1.pem", &first), files.authority("2.pem", &second));
    let trust = |path: &'_ Path| [String::from("--tls-ca"), path.to_str().unwrap().to_owned()];
    let (first_trust, second_trust) = (trust(&first_pem), trust(&second_pem));
    let (first_trust, second_trust) = (first_trust.each_ref(), second_trust.each_ref());
    let sidecar = Sidecar::start(&files.flags());
    assert_eq!(add(&sidecar, &first_trust.map(String::as_str)).output(), "101 added, times out in 15s\n");

    second.certify(&files, 10);
    assert!(sidecar.log().line("the certificate has changed and was read again").is_some());
    assert_eq!(add(&sidecar, &second_trust.map(String::as_str)).output(), "101 rearmed, times out in 15s\n");
    add(&sidecar, &first_trust.map(String::as_str)).error(1);

    fs::write(&files.certificate, "no certificate").unwrap();
    assert_eq!(add(&sidecar, &second_trust.map(String::as_str)).output(), "101 rearmed, times out in 15s\n");
    assert!(sidecar.log().line("the old certificate stays").is_some());
}

#[test]
fn a_scrape_says_when_the_certificate_runs_out_and_sees_that_it_was_renewed() {
    let expiry = |sidecar: &Sidecar| sidecar.metrics().count("tls_certificate_expiry_timestamp_seconds");
    assert_eq!(expiry(&Sidecar::start(&[])), 0, "there is none");
    let (files, authority) = (Files::new(), Authority::new());
    authority.certify_for(&files, 0, (YEAR_2000, YEAR_2500));
    let sidecar = serve(&files);
    assert_eq!(expiry(&sidecar), YEAR_2500);
    authority.certify_for(&files, 10, (YEAR_2000, YEAR_3000));
    wait_until("it is read, though nobody connects", || expiry(&sidecar) == YEAR_3000);
    fs::write(&files.certificate, "no certificate").unwrap();
    assert!(sidecar.log().line("the old certificate stays").is_some());
    assert_eq!(expiry(&sidecar), YEAR_3000, "the old one stays");
}

#[test]
fn a_certificate_whose_time_is_not_now_is_named_before_clients_refuse_it() {
    let (files, authority) = (Files::new(), Authority::new());
    let trusted = files.authority("ca.pem", &authority);
    for (years, says, clients_say) in [
        ((YEAR_1999, YEAR_2000), "ran out on", "has expired"),
        ((YEAR_2500, YEAR_3000), "is valid from", "not valid yet"),
    ] {
        authority.certify_for(&files, 0, years);
        let check = Run::of(program(&["serve", "--check-config"]).args(files.flags()));
        assert_eq!((check.code, check.stdout.as_str()), (0, "the configuration is right\n"));
        assert_names(&check.stderr, &["--tls-cert", "cert.pem", says]);
        let sidecar = serve(&files);
        assert!(sidecar.log().line(says).is_some(), "{}", sidecar.log().text());
        let refused = add(&sidecar, &["--tls-ca", trusted.to_str().unwrap()]);
        assert_names(refused.error(1), &["certificate", clients_say]);
    }
}

#[test]
fn a_certificate_that_runs_out_while_it_is_used_is_named_once() {
    let (files, authority) = (Files::new(), Authority::new());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    authority.certify_for(&files, 0, (YEAR_2000, now + 5));
    let sidecar = serve(&files);
    let told = || sidecar.log().text().matches("ran out on").count();
    wait_until("it is over", || {
        sidecar.metrics();
        told() > 0
    });
    assert!(SystemTime::now() > SystemTime::UNIX_EPOCH + Duration::from_secs(now + 5), "it was not over");
    for (age, years, times) in [(10, (YEAR_1999, YEAR_2000), 2), (20, (YEAR_2000, YEAR_3000), 2)] {
        authority.certify_for(&files, age, years);
        let read_again = || sidecar.log().text().matches("has changed and was read again").count();
        wait_until("the next was read", || {
            sidecar.metrics();
            read_again() as u64 == age / 10
        });
        wait_until("it was judged", || told() == times);
        assert_eq!(sidecar.metrics().count("tls_certificate_expiry_timestamp_seconds"), years.1);
    }
    assert_eq!(told(), 2, "once for each that had run out");
}

/// Puts a file in the place of another as `cp -p` and rsync do: its time and its length do not change.
fn replace_in_silence(path: &Path, text: &[u8]) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    fs::write(path, text).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

#[test]
fn a_certificate_that_keeps_its_time_is_read_again_too() {
    let (files, renewed, authority) = (Files::new(), Files::new(), Authority::new());
    authority.certify_for(&files, 0, (YEAR_2000, YEAR_2500));
    authority.certify_for(&renewed, 0, (YEAR_2000, YEAR_3000));
    let sidecar = serve(&files);
    for (old, new) in [(&files.key, &renewed.key), (&files.certificate, &renewed.certificate)] {
        replace_in_silence(old, &fs::read(new).unwrap());
    }
    wait_until("it is read", || sidecar.metrics().count("tls_certificate_expiry_timestamp_seconds") == YEAR_3000);
}

#[test]
fn a_probe_of_the_port_is_no_failed_handshake_and_bytes_that_begin_none_are() {
    let (files, trusted) = Files::vouched_for();
    let sidecar = serve(&files);
    let failed = || sidecar.metrics().refusals("tls_handshake");
    let opened = || sidecar.metrics().count("connections_opened_total");
    for _ in 0..10 {
        drop(Raw::tcp(sidecar.listen));
        Raw::tcp(sidecar.listen).reset();
    }
    wait_until("all have come and gone", || opened() == 20 && sidecar.metrics().connections() == 0);
    assert_eq!(failed(), 0);
    assert!(!sidecar.log().text().contains("no TLS handshake"), "{}", sidecar.log().text());
    for bytes in [&b"\x16\x03\x01"[..], b"no TLS at all"] {
        let mut client = Raw::tcp(sidecar.listen);
        client.send(bytes);
        drop(client);
    }
    wait_until("both are counted", || failed() == 2);
    assert!(sidecar.log().line("a client made no TLS handshake").is_some());
    assert_eq!(
        add(&sidecar, &["--tls-ca", trusted.to_str().unwrap()]).output(),
        "101 added, times out in 750ms\n"
    );
}

#[test]
fn a_wrong_certificate_is_refused_at_the_start() {
    let (files, authority) = (Files::new(), Authority::new());
    authority.certify(&files, 0);
    let check = |flags: &[&str]| Run::of(program(&["serve", "--check-config"]).args(flags));
    assert_eq!(check(&files.flags()).output(), "the configuration is right\n");
    let beyond_loopback = [&["--listen", "0.0.0.0:0"][..], &files.flags()[..]].concat();
    assert_names(check(&beyond_loopback).error(64), &["--tls-client-ca", "--token-file", "--tls-cert alone"]);
    assert_names(check(&files.flags()[..2]).error(64), &["--tls-cert", "--tls-key", "both"]);
    fs::write(&files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
    assert_names(check(&files.flags()).error(64), &["key.pem", "not that of the certificate"]);
    fs::write(&files.key, "no key").unwrap();
    assert_names(check(&files.flags()).error(64), &["key.pem", "no private key", "PEM"]);
    fs::write(&files.certificate, "no certificate").unwrap();
    assert_names(check(&files.flags()).error(64), &["cert.pem", "no certificate in it", "PEM"]);
}

#[test]
fn a_redis_that_speaks_tls_is_served_if_its_certificate_is_trusted() {
    let (authority, files) = (Authority::new(), Files::new());
    authority.certify(&files, 0);
    let trusted = files.authority("ca.pem", &authority);
    let redis = Redis::speaking_tls(&files, &trusted);
    let store = format!("rediss://127.0.0.1:{}/", redis.port_for_peers());
    let flags = ["--store", &store, "--threads", "1"];
    let sidecar = Sidecar::spawn(sidecar::serve(&flags).env("SSL_CERT_FILE", &trusted));
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 15, 1)).added();
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [ACKED]);
    // A file system that hangs, as the next connection to Redis meets it.
    let kept = trusted.with_extension("kept");
    fs::rename(&trusted, &kept).unwrap();
    mknodat(CWD, &trusted, FileType::Fifo, Mode::RWXU, 0).unwrap();
    redis.command::<u64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    wait_until("it is not ready", || !sidecar.is_ready());
    let asked = Instant::now();
    assert_eq!(connection.ask(&frames::ping(b"here")).body, b"here");
    assert_eq!(sidecar.get("/livez").0, 200);
    assert!(asked.elapsed() < SLACK, "it answered after {:?}", asked.elapsed());
    let mut pipe = fs::File::options().write(true).open(&trusted).unwrap();
    fs::rename(&kept, &trusted).unwrap();
    pipe.write_all(&fs::read(&trusted).unwrap()).unwrap();
    drop(pipe);
    sidecar.wait_until_ready();

    let untrusted = Run::of(&mut sidecar::serve(&["--store", &store]));
    assert_names(untrusted.error(1), &["certificate", "--redis-ca"]);

    authority.certify_for(&files, 10, (YEAR_1999, YEAR_2000));
    redis.command::<()>(&["CONFIG", "SET", "tls-cert-file", files.certificate.to_str().unwrap()]);
    let expired = Run::of(sidecar::serve(&["--store", &store]).env("SSL_CERT_FILE", &trusted));
    assert_names(expired.error(1), &["expired", "renew the certificate of Redis"]);
}
