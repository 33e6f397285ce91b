//! The wire protocol: frames as values ([`frame`]) and as bytes ([`codec`]). docs/PROTOCOL.md specifies every byte.
//!
//! `server` and `client` keep the state of each connection; this module keeps none.

pub mod codec;
pub mod frame;
pub mod resp;
pub(crate) mod token_file;

pub use codec::{Codec, DecodeError, Decoded};
pub use frame::{Body, Frame};
