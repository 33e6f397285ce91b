//! The wire protocol: frames as values ([`frame`]) and as bytes ([`codec`]). docs/PROTOCOL.md specifies every byte.
//!
//! The state of a connection is kept by server and client.

pub mod codec;
pub mod frame;

pub use codec::{Codec, DecodeError, Decoded};
pub use frame::{Body, Frame};
