//! The bytes of the protocol.
