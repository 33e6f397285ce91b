//! The tokens that a server accepts, with their names and rights.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::watched_files::FileContent;
use crate::protocol::frame::{MAX_TOKEN_LENGTH, Secret};
use crate::protocol::token_file::{TokenLine, token_lines};

/// The name of a token whose line has no name.
const DEFAULT_NAME: &str = "default";

const MAX_NAME_LENGTH: usize = 64;

/// The maximum number of tokens in a file. Every Hello is compared with each.
const MAX_TOKENS: usize = 256;

/// A token with fewer bytes, or fewer different bytes, can be guessed.
const SHORTEST_STRONG: usize = 16;
const FEWEST_DISTINCT: usize = 8;

/// A right: which requests a connection may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Right {
    /// `AddNewMsg` and `DelMsg`.
    Produce = 1,
    /// `Subscribe`, `BatchAck` and `BatchNack`.
    Consume = 2,
    /// `GroupDelete`.
    Admin = 4,
}

impl Right {
    const ALL: [Right; 3] = [Right::Produce, Right::Consume, Right::Admin];

    const fn as_str(self) -> &'static str {
        match self {
            Right::Produce => "produce",
            Right::Consume => "consume",
            Right::Admin => "admin",
        }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A set of rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rights(u8);

impl Rights {
    pub(super) const ALL: Rights = Rights(7);

    pub(super) fn contains(self, right: Right) -> bool {
        self.0 & right as u8 != 0
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rights: Vec<&str> =
            Right::ALL.into_iter().filter(|right| self.contains(*right)).map(Right::as_str).collect();
        f.write_str(&rights.join(","))
    }
}

/// The tokens of a file.
pub(super) struct Tokens {
    path: PathBuf,
    tokens: Vec<Arc<Token>>,
}

#[derive(Debug)]
pub(super) struct Token {
    pub(super) secret: Secret,
    line: usize,
    pub(super) name: Arc<str>,
    pub(super) rights: Rights,
    /// Whether the token is easy to guess.
    pub(super) is_weak: bool,
}

impl Tokens {
    /// Parses a file of tokens. An error names the file and the line, and never a token.
    pub(super) fn parse(file: &FileContent) -> io::Result<Tokens> {
        let mut tokens: Vec<Arc<Token>> = Vec::new();
        for line in token_lines(&file.bytes) {
            let wrong = |why: &str| Err(file.error(&format_args!("line {}: {why}", line.number)));
            let token = match Token::parse(&line) {
                Ok(token) => token,
                Err(why) => return wrong(&why),
            };
            for earlier in &tokens {
                if earlier.secret == token.secret {
                    return wrong(&format!("this token is on line {} already: remove one of them", earlier.line));
                }
                if earlier.name == token.name && earlier.rights != token.rights {
                    return wrong(&format!(
                        "the token {} has the rights {} on line {} and {} here: give both the same rights, or other names",
                        token.name, earlier.rights, earlier.line, token.rights
                    ));
                }
            }
            if tokens.len() == MAX_TOKENS {
                return wrong(&format!("a file has at most {MAX_TOKENS} tokens: remove the others"));
            }
            tokens.push(Arc::new(token));
        }
        if tokens.is_empty() {
            let why = format!("there is no token in it: write one a line, each of 1 to {MAX_TOKEN_LENGTH} bytes");
            return Err(file.error(&why));
        }
        Ok(Tokens { path: file.path.clone(), tokens })
    }

    /// Returns the token that equals `presented`. Compares with all tokens, each in a time that does not depend on how
    /// many bytes are right, so that the duration does not reveal them.
    pub(super) fn find(&self, presented: &[u8]) -> Option<&Arc<Token>> {
        let mut found = u32::MAX;
        for (index, token) in (0..).zip(&self.tokens) {
            let is_equal: Choice = token.secret.0.ct_eq(presented);
            found.conditional_assign(&index, is_equal);
        }
        self.tokens.get(found as usize)
    }

    /// Returns a warning for each token that is easy to guess.
    pub(super) fn weak(&self) -> impl Iterator<Item = String> {
        self.tokens.iter().filter(|token| token.is_weak).map(|token| {
            format!(
                "--token-file: the token {} on line {} of {} is easy to guess: use at least {SHORTEST_STRONG} random bytes, \
                 such as those of: head -c 24 /dev/urandom | base64",
                token.name,
                token.line,
                self.path.display()
            )
        })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.tokens.iter().map(|token| &token.name)
    }
}

impl Token {
    fn parse(line: &TokenLine<'_>) -> Result<Token, String> {
        let name = match line.name {
            None => DEFAULT_NAME,
            Some(name) => legal_name(name).ok_or_else(|| {
                format!(
                    "the text before the colon is not a name: use 1 to {MAX_NAME_LENGTH} of the characters A-Z a-z 0-9 _ . -"
                )
            })?,
        };
        if !(1..=MAX_TOKEN_LENGTH).contains(&line.token.len()) {
            return Err(format!(
                "a token has 1 to {MAX_TOKEN_LENGTH} bytes, and this one has {}",
                line.token.len()
            ));
        }
        let mut rights = Rights(0);
        let words = line.rights.split(|byte| byte.is_ascii_whitespace() || *byte == b',');
        for word in words.filter(|word| !word.is_empty()) {
            let right =
                Right::ALL.into_iter().find(|right| right.as_str().as_bytes() == word).ok_or_else(|| {
                    String::from(
                        "a word after the token is not a right: use produce, consume or admin, or no word for all",
                    )
                })?;
            rights.0 |= right as u8;
        }
        if rights == Rights(0) {
            rights = Rights::ALL;
        }
        let (secret, is_weak) = (Secret(line.token.to_vec()), is_weak(line.token));
        Ok(Token { secret, line: line.number, name: Arc::from(name), rights, is_weak })
    }
}

fn is_weak(secret: &[u8]) -> bool {
    let mut distinct = secret.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    secret.len() < SHORTEST_STRONG || distinct.len() < FEWEST_DISTINCT
}

fn legal_name(name: &[u8]) -> Option<&str> {
    let is_legal = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-".contains(byte);
    let is_name = (1..=MAX_NAME_LENGTH).contains(&name.len()) && name.iter().all(is_legal);
    str::from_utf8(name).ok().filter(|_| is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> io::Result<Tokens> {
        Tokens::parse(&FileContent { path: PathBuf::from("file"), bytes: text.as_bytes().to_vec() })
    }

    #[test]
    fn a_token_is_found_with_its_name_and_rights() {
        let tokens =
            parse("node:first produce\nnode:second\tproduce\nthird\nall:fourth admin, consume produce").unwrap();
        let found = |token: &[u8]| tokens.find(token).map(|token| (&*token.name, token.rights.to_string()));
        assert_eq!(found(b"first"), Some(("node", String::from("produce"))));
        assert_eq!(found(b"second"), Some(("node", String::from("produce"))));
        assert_eq!(found(b"third"), Some(("default", String::from("produce,consume,admin"))));
        assert_eq!(found(b"fourth"), Some(("all", String::from("produce,consume,admin"))));
        for wrong in [&b""[..], b"firs", b"first ", b"node:first", b"fifth"] {
            assert!(found(wrong).is_none());
        }
    }

    #[test]
    fn errors_name_the_line_and_no_token() {
        let long = "s".repeat(MAX_TOKEN_LENGTH + 1);
        let many = (0..=MAX_TOKENS).map(|number| format!("s{number}")).collect::<Vec<_>>().join("\n");
        for (text, words) in [
            ("", "no token in it"),
            ("# nothing\n\n", "no token in it"),
            (&long, "line 1: a token has 1 to 1024 bytes, and this one has 1025"),
            ("node:", "line 1: a token has 1 to 1024 bytes, and this one has 0"),
            ("good\n\nno name:secret", "line 3: a word after"),
            ("n/a:secret", "line 1: the text before the colon is not a name"),
            ("a:secret\nb:secret", "line 2: this token is on line 1 already"),
            (
                "secret produce\nsecret2 consume",
                "line 2: the token default has the rights produce on line 1 and consume",
            ),
            ("secret write", "line 1: a word after the token is not a right"),
            (&many, "line 257: a file has at most 256 tokens"),
        ] {
            let error = parse(text).err().unwrap_or_else(|| panic!("{text:?} is right")).to_string();
            assert!(error.starts_with("file: ") && error.contains(words), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_weak_token_is_named_by_line() {
        let tokens = parse("a:0123456789abcdef\nb:0123456789abcde\n#\nc:aaaaaaaaaaaabbbbbbbbbbbbb\n").unwrap();
        let weak: Vec<String> = tokens.weak().collect();
        assert_eq!(weak.len(), 2, "{weak:?}");
        assert!(
            weak[0].contains("token b on line 2 of file") && weak[1].contains("token c on line 4"),
            "{weak:?}"
        );
    }
}
