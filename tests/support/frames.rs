//! Frames by hand, from docs/PROTOCOL.md: nothing here knows the codec.

pub const HELLO: u8 = 0x01;
pub const WELCOME: u8 = 0x81;
pub const PING: u8 = 0x02;
pub const PONG: u8 = 0x82;
pub const GO_AWAY: u8 = 0x03;
pub const ADD: u8 = 0x10;
pub const ADD_ANSWER: u8 = 0x90;
pub const DEL: u8 = 0x11;
pub const DEL_ANSWER: u8 = 0x91;
pub const GET: u8 = 0x12;
pub const GET_ANSWER: u8 = 0x92;
pub const SUBSCRIBE: u8 = 0x20;
pub const SUBSCRIBED: u8 = 0xa0;
pub const TIMEOUT_BATCH: u8 = 0x21;
pub const BATCH_ACK: u8 = 0x22;
pub const BATCH_ACK_ANSWER: u8 = 0xa2;
pub const BATCH_NACK: u8 = 0x23;
pub const BATCH_NACK_ANSWER: u8 = 0xa3;
pub const GROUP_DELETE: u8 = 0x24;
pub const GROUP_DELETE_ANSWER: u8 = 0xa4;
pub const ERROR: u8 = 0xff;

pub const CLIENTS: u8 = 0x01;
pub const WITHDRAW: u8 = 0x02;
pub const EPHEMERAL: u8 = 0x01;
pub const FROM_END: u8 = 0x02;
pub const OUTCOME_UNKNOWN: u8 = 0x01;
pub const RETRYABLE: u8 = 0x02;

pub const UNKNOWN: u8 = 0;
pub const ACKED: u8 = 1;
pub const LATE: u8 = 2;
pub const WITHDRAWN: u8 = 3;

/// A request before it has a correlation id.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: u8,
    pub flags: u8,
    pub status: u16,
    pub body: Vec<u8>,
}

impl Request {
    pub fn new(kind: u8, flags: u8, body: Vec<u8>) -> Request {
        Request { kind, flags, status: 0, body }
    }

    pub fn bytes(&self, correlation: u32) -> Vec<u8> {
        let length = u32::try_from(8 + self.body.len()).expect("no test makes such a frame");
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend([self.kind, self.flags]);
        bytes.extend(self.status.to_be_bytes());
        bytes.extend(correlation.to_be_bytes());
        bytes.extend(&self.body);
        bytes
    }
}

/// Hello with a range of versions and a token.
pub fn hello(versions: (u8, u8), token: &[u8]) -> Request {
    let mut body = b"ACKW".to_vec();
    body.extend([versions.0, versions.1]);
    body.extend(u16::try_from(token.len()).expect("no test makes such a token").to_be_bytes());
    body.extend(token);
    body.extend(text("tests"));
    Request::new(HELLO, 0, body)
}

/// AddNewMsg; an ack timeout of 0 ticks asks for the default.
pub fn add(ids: &[u64], ack_timeout_ticks: u16, attempt: u8) -> Request {
    let mut body = ack_timeout_ticks.to_be_bytes().to_vec();
    body.extend([attempt, 0]);
    body.extend(list(ids));
    Request::new(ADD, 0, body)
}

/// AddNewMsg with clients.
pub fn add_pairs(pairs: &[(u64, u64)], ack_timeout_ticks: u16) -> Request {
    let (ids, clients): (Vec<u64>, Vec<u64>) = pairs.iter().copied().unzip();
    let mut request = add(&ids, ack_timeout_ticks, 1);
    request.flags = CLIENTS;
    request.body.extend(clients.iter().flat_map(|client| client.to_be_bytes()));
    request
}

pub fn del(ids: &[u64]) -> Request {
    Request::new(DEL, 0, list(ids))
}

pub fn withdraw(ids: &[u64]) -> Request {
    Request::new(DEL, WITHDRAW, list(ids))
}

pub fn get(ids: &[u64]) -> Request {
    Request::new(GET, 0, list(ids))
}

pub fn ping(payload: &[u8]) -> Request {
    Request::new(PING, 0, payload.to_vec())
}

pub fn go_away() -> Request {
    Request::new(GO_AWAY, 0, vec![0, 2, 0, 0, 0, 0, 3, 0xe8])
}

pub fn subscribe(group: &str, credit: u32, flags: u8) -> Request {
    let mut body = credit.to_be_bytes().to_vec();
    body.extend(text(group));
    Request::new(SUBSCRIBE, flags, body)
}

pub fn batch_ack(batches: &[[u8; 24]]) -> Request {
    let mut body = u32::try_from(batches.len()).expect("few batches").to_be_bytes().to_vec();
    body.extend(batches.concat());
    Request::new(BATCH_ACK, 0, body)
}

pub fn batch_nack(batch: [u8; 24], delay_ms: u32) -> Request {
    let mut body = batch.to_vec();
    body.extend(delay_ms.to_be_bytes());
    Request::new(BATCH_NACK, 0, body)
}

pub fn group_delete(group: &str) -> Request {
    Request::new(GROUP_DELETE, 0, text(group))
}

fn list(ids: &[u64]) -> Vec<u8> {
    let count = u32::try_from(ids.len()).expect("no test makes such a list");
    count.to_be_bytes().into_iter().chain(ids.iter().flat_map(|id| id.to_be_bytes())).collect()
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(text.len()).expect("no test makes such a text")];
    bytes.extend(text.as_bytes());
    bytes
}

/// A frame as it came.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub status: u16,
    pub correlation: u32,
    pub body: Vec<u8>,
}

impl Frame {
    /// Takes a frame off the beginning, if it is there as a whole.
    pub fn take(bytes: &mut Vec<u8>) -> Option<Frame> {
        let length = u32_at(bytes.get(..4)?, 0) as usize;
        assert!((8..=1_048_576).contains(&length), "a client must accept a length of {length}");
        if bytes.len() < 4 + length {
            return None;
        }
        let rest = bytes.split_off(4 + length);
        let frame = std::mem::replace(bytes, rest);
        Some(Frame {
            kind: frame[4],
            flags: frame[5],
            status: u16::from_be_bytes([frame[6], frame[7]]),
            correlation: u32_at(&frame, 8),
            body: frame[12..].to_vec(),
        })
    }

    /// Its text, where it is an Error.
    pub fn text(&self) -> &str {
        assert_eq!(self.kind, ERROR, "{self:?}");
        str::from_utf8(&self.body).expect("a text is UTF-8")
    }

    /// Asserts that it is an Error with this code and flags, and a text that is a sentence.
    #[track_caller]
    pub fn assert_error(&self, code: u16, flags: u8) {
        assert_eq!((self.kind, self.status, self.flags), (ERROR, code, flags), "{self:?}");
        assert!(self.text().len() > 10, "{self:?}");
    }

    /// The outcomes, where it answers a DelMsg.
    #[track_caller]
    pub fn outcomes(&self) -> &[u8] {
        assert_eq!((self.kind, self.flags, self.status), (DEL_ANSWER, 0, 0), "{self:?}");
        assert_eq!(u32_at(&self.body, 0) as usize, self.body.len() - 4, "{self:?}");
        &self.body[4..]
    }

    /// The number, remaining time in ms and attempt of each state, where it answers a GetMsg.
    #[track_caller]
    pub fn states(&self) -> Vec<(u8, u32, u8)> {
        assert_eq!((self.kind, self.flags, self.status), (GET_ANSWER, 0, 0), "{self:?}");
        let states = self.body[4..].chunks(14).map(|state| (state[0], u32_at(state, 9), state[13]));
        states.collect()
    }

    /// The deadline and which were re-armed, where it answers an AddNewMsg.
    #[track_caller]
    pub fn added(&self) -> (u64, Vec<bool>) {
        assert_eq!((self.kind, self.flags, self.status), (ADD_ANSWER, 0, 0), "{self:?}");
        let (count, bits) = (u32_at(&self.body, 8) as usize, &self.body[16..]);
        assert_eq!(bits.len(), count.div_ceil(8), "{self:?}");
        let rearmed: Vec<bool> = (0..count).map(|index| bits[index / 8] >> (index % 8) & 1 == 1).collect();
        assert_eq!(u32_at(&self.body, 12) as usize, rearmed.iter().filter(|rearmed| **rearmed).count());
        (u64_at(&self.body, 0), rearmed)
    }
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
