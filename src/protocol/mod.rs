//! The wire protocol, in three layers: values ([`frame`]), bytes ([`codec`]), and, in server and client,
//! the state of a connection. docs/PROTOCOL.md specifies it to the byte.

pub mod codec;
pub mod frame;
mod kind;

pub use codec::{Codec, DecodeError, Decoded};
pub use frame::{Body, Frame};
