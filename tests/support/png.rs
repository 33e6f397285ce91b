//! A picture with few colours as a PNG with a palette: a third of what the browser makes of it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::Write;

use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};

/// How many colours a palette has room for.
const COLOURS: usize = 256;

type Colour = [u8; 3];

/// The PNG of pixels, each of four bytes, of which the last, how opaque it is, is left out. Colours for which the
/// palette has no room become the nearest that it has.
pub fn indexed(width: u32, pixels: &[u8]) -> Vec<u8> {
    let colours: Vec<Colour> = pixels.chunks_exact(4).map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect();
    let mut counts: HashMap<Colour, usize> = HashMap::new();
    for colour in &colours {
        *counts.entry(*colour).or_default() += 1;
    }
    let palette = palette(&counts);
    let indices: HashMap<Colour, u8> =
        counts.into_keys().map(|colour| (colour, nearest(&palette, colour))).collect();

    let row = usize::try_from(width).expect("a picture fits into memory");
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    for row in colours.chunks_exact(row) {
        // A row begins with the number of its filter; 0 is none.
        let bytes: Vec<u8> = std::iter::once(0).chain(row.iter().map(|colour| indices[colour])).collect();
        encoder.write_all(&bytes).expect("memory takes it");
    }
    let height = u32::try_from(colours.len() / row).expect("a picture is not as high as that");
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    // Eight bits an index, into a palette; compression, filters and order as always.
    header.extend([8, 3, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut png, *b"IHDR", &header);
    chunk(&mut png, *b"PLTE", &palette.concat());
    chunk(&mut png, *b"IDAT", &encoder.finish().expect("memory takes it"));
    chunk(&mut png, *b"IEND", &[]);
    png
}

/// Frequent colours as they are, and of the others so many that none is farther from its nearest than it must be: what
/// is seldom, as a mark in a legend, has its colour for a reason.
fn palette(counts: &HashMap<Colour, usize>) -> Vec<Colour> {
    let mut colours: Vec<Colour> = counts.keys().copied().collect();
    colours.sort_unstable_by_key(|colour| (Reverse(counts[colour]), *colour));
    let thinned = |least: u32| {
        let mut palette: Vec<Colour> = Vec::new();
        for colour in &colours {
            if palette.iter().all(|other| distance(*colour, *other) > least) {
                palette.push(*colour);
            }
        }
        palette
    };
    let fits = (0..=u32::from(u8::MAX)).map(|root| thinned(root * root)).find(|palette| palette.len() <= COLOURS);
    fits.expect("at some distance there is one colour")
}

/// The square of how far apart they are.
fn distance(one: Colour, other: Colour) -> u32 {
    let differences = one.iter().zip(other).map(|(one, other)| u32::from(one.abs_diff(other)));
    differences.map(|difference| difference * difference).sum()
}

fn nearest(palette: &[Colour], colour: Colour) -> u8 {
    let indexed = (0..=u8::MAX).zip(palette);
    indexed.min_by_key(|(_, other)| distance(colour, **other)).expect("a picture has a colour").0
}

fn chunk(png: &mut Vec<u8>, kind: [u8; 4], data: &[u8]) {
    let mut crc = Crc::new();
    crc.update(&kind);
    crc.update(data);
    png.extend(u32::try_from(data.len()).expect("a chunk is short").to_be_bytes());
    png.extend(kind);
    png.extend(data);
    png.extend(crc.sum().to_be_bytes());
}
