//! Reads a trace: lines `src dst unix_seconds`, plain or gzip.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use flate2::bufread::MultiGzDecoder;

/// The first two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// An instant message as the trace has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    /// The sender.
    pub source: u64,
    /// Whom it was sent to.
    pub destination: u64,
    /// When, in Unix time.
    pub seconds: u64,
}

/// Reads a whole trace. A gzip file is recognised by its first bytes, not by its name.
///
/// # Errors
///
/// When the file cannot be read, has a line that is not a message, or has none at all. Errors name the line.
pub fn read(path: &Path) -> anyhow::Result<Vec<Push>> {
    let file = File::open(path).with_context(|| format!("cannot open the trace {}", path.display()))?;
    let mut plain = BufReader::new(file);
    let start = plain.fill_buf().with_context(|| format!("cannot read the trace {}", path.display()))?;
    let parsed = if start.starts_with(&GZIP_MAGIC) {
        parse(BufReader::new(MultiGzDecoder::new(plain)))
    } else {
        parse(plain)
    };
    parsed.with_context(|| format!("the trace {} cannot be replayed", path.display()))
}

/// Parses lines. The first may be a header; blank lines and comments (`#`) do not count.
fn parse(lines: impl BufRead) -> anyhow::Result<Vec<Push>> {
    let mut pushes = Vec::new();
    for (number, line) in (1..).zip(lines.lines()) {
        let line = line.with_context(|| format!("line {number} cannot be read"))?;
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') || number == 1 && is_header(line) {
            continue;
        }
        let push =
            line.parse().with_context(|| format!("line {number} is not a message: {:?}", shortened(line)))?;
        pushes.push(push);
    }
    ensure!(!pushes.is_empty(), "it has no messages: write one a line, as `src dst unix_seconds`");
    Ok(pushes)
}

/// A header has words only: a first line with a number in it is meant as a message.
fn is_header(line: &str) -> bool {
    line.split_whitespace().all(|word| word.starts_with(|first: char| first.is_alphabetic()))
}

impl FromStr for Push {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Push> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [source, destination, seconds] = fields[..] else {
            bail!("it has {} fields and not 3; write `src dst unix_seconds`", fields.len());
        };
        Ok(Push {
            source: whole_number("src", source)?,
            destination: whole_number("dst", destination)?,
            seconds: whole_number("unix_seconds", seconds)?,
        })
    }
}

fn whole_number(name: &str, text: &str) -> anyhow::Result<u64> {
    let refusal = || format!("{name} is {:?} and not a whole number up to {}", shortened(text), u64::MAX);
    text.parse().ok().with_context(refusal)
}

/// Enough of a text to recognise it by: a binary file may be one endless line.
fn shortened(text: &str) -> String {
    const ENOUGH: usize = 60;
    match text.char_indices().nth(ENOUGH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const TRACE: &str = "src dst time\n1 2 1082040961\r\n\n  3\t4   1082155839\n";

    fn expected() -> Vec<Push> {
        vec![
            Push { source: 1, destination: 2, seconds: 1_082_040_961 },
            Push { source: 3, destination: 4, seconds: 1_082_155_839 },
        ]
    }

    fn error_of(trace: &[u8]) -> String {
        format!("{:#}", parse(trace).expect_err("a wrong trace"))
    }

    fn read_bytes(bytes: &[u8]) -> anyhow::Result<Vec<Push>> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        read(file.path())
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn a_header_and_blank_lines_are_skipped() {
        assert_eq!(parse(TRACE.as_bytes()).unwrap(), expected());
        assert_eq!(parse("# from SNAP\n3 4 5".as_bytes()).unwrap().len(), 1);
        assert_eq!(parse("3 4 5".as_bytes()).unwrap().len(), 1, "the header is not needed");
    }

    #[test]
    fn gzip_is_told_by_its_first_bytes_and_may_have_several_members() {
        assert_eq!(read_bytes(TRACE.as_bytes()).unwrap(), expected());
        assert_eq!(read_bytes(&gzip(TRACE)).unwrap(), expected());
        let members = [gzip("src dst time\n1 2 1082040961\n"), gzip("3 4 1082155839\n")].concat();
        assert_eq!(read_bytes(&members).unwrap(), expected());
    }

    #[test]
    fn a_wrong_line_is_named_with_what_is_wrong_with_it() {
        let error = error_of(b"src dst time\n1 2 3\n4 5\n");
        assert!(error.contains("line 3") && error.contains("2 fields") && error.contains("4 5"), "{error}");
        let error = error_of(b"1 2 3\n1 two 3\n");
        assert!(error.contains("line 2") && error.contains("dst") && error.contains("two"), "{error}");
        let error = error_of(b"1 2 3\n1 2 -3\n");
        assert!(error.contains("line 2") && error.contains("unix_seconds"), "{error}");
        let error = error_of(b"1 2 x\n");
        assert!(error.contains("line 1"), "a first line with numbers is no header: {error}");
        let error = error_of(b"src dst time\nsrc dst time\n");
        assert!(error.contains("line 2"), "one header is enough: {error}");
        let error = error_of(b"1 2 3\n\xff\xfe\n");
        assert!(error.contains("line 2"), "{error}");
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        assert!(error_of(b"").contains("no messages"));
        assert!(error_of(b"src dst time\n").contains("no messages"));
        let cut = gzip(TRACE);
        let error = format!("{:#}", read_bytes(&cut[..cut.len() - 12]).unwrap_err());
        assert!(error.contains("line") && error.contains("cannot be read"), "{error}");
        assert!(error_of(&[b'7'; 10_000]).len() < 200, "an endless line is not repeated whole");
    }
}
