//! beanstalkd: a put with a delay, and a delete of the job.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;

use anyhow::{Context, bail};

use crate::by_hand::Dialect;
use crate::child::{Child, free_port, installed};
use crate::numbers::{id, push_decimal};
use crate::redis::wait_for;

/// A server of its own.
#[derive(Debug)]
pub struct Beanstalkd {
    _process: Child,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Beanstalkd {
    /// Starts it; `None` where it is not installed.
    ///
    /// # Errors
    ///
    /// When it does not start.
    pub fn start() -> anyhow::Result<Option<Beanstalkd>> {
        let Some(program) = installed("BEANSTALKD", "beanstalkd") else { return Ok(None) };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let port = address.port().to_string();
        let mut process = Child::guarded(&program, &["-l", "127.0.0.1", "-p", &port])?;
        wait_for(address, &mut process).context("beanstalkd does not start")?;
        Ok(Some(Beanstalkd { _process: process, address }))
    }
}

/// Its protocol. A message is a job whose body is the message's id; the server gives the job an id of its own, by
/// which it is deleted.
#[derive(Debug, Default)]
pub struct Jobs {
    body: Vec<u8>,
    /// For each unanswered command, in order: whether it is a put.
    asked: VecDeque<bool>,
    /// Ids of the jobs in flight.
    put: VecDeque<u64>,
}

const INSERTED: &[u8] = b"INSERTED ";
const DELETED: &[u8] = b"DELETED";

impl Dialect for Jobs {
    fn add(&mut self, numbers: Range<u64>, output: &mut Vec<u8>) {
        self.body.clear();
        push_decimal(&mut self.body, id(numbers.start));
        // Priority, seconds of delay, seconds to run, bytes.
        output.extend_from_slice(b"put 0 15 60 ");
        push_decimal(output, self.body.len() as u64);
        output.extend_from_slice(b"\r\n");
        output.extend_from_slice(&self.body);
        output.extend_from_slice(b"\r\n");
        self.asked.push_back(true);
    }

    fn del(&mut self, numbers: Range<u64>, output: &mut Vec<u8>) {
        // Scattered as far as the messages of the other loads are.
        let among = (self.put.len() as u64 / 4).max(1);
        let job = usize::try_from(id(numbers.start) % among).ok().and_then(|nth| self.put.swap_remove_front(nth));
        let job = job.expect("more is in flight than is not answered");
        output.extend_from_slice(b"delete ");
        push_decimal(output, job);
        output.extend_from_slice(b"\r\n");
        self.asked.push_back(false);
    }

    fn answered(&mut self, input: &[u8], _output: &mut Vec<u8>) -> anyhow::Result<(usize, u64)> {
        let (mut bytes, mut operations) = (0, 0);
        while let Some(length) = input[bytes..].windows(2).position(|end| end == b"\r\n") {
            let line = &input[bytes..bytes + length];
            let is_put = self.asked.pop_front().context("beanstalkd answers what was not asked")?;
            match line.strip_prefix(INSERTED) {
                Some(job) if is_put => self.put.push_back(std::str::from_utf8(job)?.parse()?),
                None if !is_put && line == DELETED => {}
                _ => bail!("beanstalkd answers {:?}", String::from_utf8_lossy(line)),
            }
            bytes += length + 2;
            operations += 1;
        }
        Ok((bytes, operations))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_deleted_by_the_id_that_it_was_given() {
        let (mut jobs, mut output) = (Jobs::default(), Vec::new());
        jobs.add(0..1, &mut output);
        let body = id(0).to_string();
        assert_eq!(output, format!("put 0 15 60 {}\r\n{body}\r\n", body.len()).into_bytes());
        assert_eq!(jobs.answered(b"INSERTED 71\r\nINS", &mut Vec::new()).unwrap(), (13, 1));
        output.clear();
        jobs.del(0..1, &mut output);
        assert_eq!(output, b"delete 71\r\n");
        assert!(jobs.answered(b"NOT_FOUND\r\n", &mut Vec::new()).is_err());
    }
}
