//! The line of a text that a problem concerns, with a mark below it.

use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

/// Columns of an excerpt.
const COLUMNS_MAX: usize = 100;

/// Most characters of a marked line. A longer one gets no excerpt.
const LINE_CHARACTERS_MAX: usize = 1 << 16;

/// The place of a problem, `--> file:line:column`, and the line with a mark below the bytes `at`. A mark ends with its line.
/// Empty for a text without lines.
pub fn excerpt(file: &str, text: &str, at: &Range<usize>) -> String {
    let start = text.floor_char_boundary(at.start.min(text.len()));
    let line_start = text[..start].rfind('\n').map_or(0, |end| end + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |end| start + end);
    let line = text[line_start..line_end].trim_end_matches('\r');
    if text.is_empty() || line.len() > LINE_CHARACTERS_MAX {
        return String::new();
    }
    let end = text.ceil_char_boundary(at.end.clamp(start, line_end));
    let marked = (start - line_start).min(line.len())..(end - line_start).min(line.len());
    let number = 1 + text[..line_start].matches('\n').count();
    let mark = AnnotationKind::Primary.span(marked);
    let snippet = Snippet::source(line).line_start(number).path(file).annotation(mark);
    let rendered =
        Renderer::plain().term_width(COLUMNS_MAX).render(&[Group::with_level(Level::ERROR).element(snippet)]);
    rendered.lines().flat_map(|line| ["\n", line.trim_end()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_shown_and_marked() {
        let text = "mesh = 'fsdp=2'\nmehs = 'x' # größe\n";
        let rows = [
            (16..20, "\n --> a.toml:2:1\n  |\n2 | mehs = 'x' # größe\n  | ^^^^"),
            (23..26, "\n --> a.toml:2:8\n  |\n2 | mehs = 'x' # größe\n  |        ^^^"),
            // A mark over several lines ends with the first.
            (7..30, "\n --> a.toml:1:8\n  |\n1 | mesh = 'fsdp=2'\n  |        ^^^^^^^^"),
        ];
        for (at, expected) in rows {
            assert_eq!(excerpt("a.toml", text, &at), expected);
        }
        assert_eq!(excerpt("a.toml", "", &(0..3)), "");
        // Any position is accepted.
        for start in 0..text.len() + 3 {
            for end in 0..text.len() + 3 {
                assert!(excerpt("a.toml", text, &(start..end)).contains("--> a.toml:"), "{start}..{end}");
            }
        }
        let bell = excerpt("a.toml", "a = '\u{7}'", &(0..1));
        assert!(!bell.contains('\u{7}'), "{bell:?}");
    }
}
