//! The pieces of a model of `SentencePiece`: field 1 of its message, each a text (1), a score (2) and a kind (3).

/// A piece.
#[derive(Clone, Debug, PartialEq)]
pub struct SentencePiece {
    /// Its text.
    pub text: String,
    /// Its score.
    pub score: f32,
    /// Its kind: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 a byte. GGUF numbers kinds of tokens so, too.
    pub kind: i32,
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 127) << shift;
        if first & 128 == 0 {
            return Some(value);
        }
    }
    None
}

/// The number of the next field, its number if it is one, and its bytes otherwise.
fn field<'a>(bytes: &mut &'a [u8]) -> Option<(u64, u64, &'a [u8])> {
    let tag = varint(bytes)?;
    let len = match tag & 7 {
        0 => return Some((tag >> 3, varint(bytes)?, &[])),
        1 => 8,
        2 => usize::try_from(varint(bytes)?).ok()?,
        5 => 4,
        _ => return None,
    };
    Some((tag >> 3, 0, bytes.split_off(..len)?))
}

/// The pieces of a model; `None` if the bytes are none.
pub fn sentence_pieces(mut bytes: &[u8]) -> Option<Vec<SentencePiece>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (1, _, mut of_piece) = field(&mut bytes)? else { continue };
        let mut piece = SentencePiece { text: String::new(), score: 0.0, kind: 1 };
        while !of_piece.is_empty() {
            match field(&mut of_piece)? {
                (1, _, text) => std::str::from_utf8(text).ok()?.clone_into(&mut piece.text),
                (2, _, score) => piece.score = f32::from_le_bytes(score.try_into().ok()?),
                (3, kind, _) => piece.kind = i32::try_from(kind).ok()?,
                _ => {}
            }
        }
        found.push(piece);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read() {
        let model = b"\x0a\x09\x0a\x02ab\x15\0\0\xc0\x3f\x12\x02zz\x0a\x05\x0a\x01\x3c\x18\x06";
        let piece = |text: &str, score, kind| SentencePiece { text: text.to_owned(), score, kind };
        assert_eq!(sentence_pieces(model), Some(vec![piece("ab", 1.5, 1), piece("<", 0.0, 6)]));
        for len in 0..model.len() {
            assert_eq!(sentence_pieces(&model[..len]).is_some(), [0, 11, 15].contains(&len), "{len}");
        }
        assert_eq!(sentence_pieces(&[0xff; 12]), None);
    }
}
