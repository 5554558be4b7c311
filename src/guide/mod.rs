//! The guide for users, one topic a page. The same pages are in `src/guide/` of the repository.
//!
#![doc = include_str!("links.txt")]
#![doc = include_str!("contents.md")]
#![allow(clippy::doc_markdown, reason = "the pages are prose for users")]

/// Declares a module for each page. `links.txt` comes first: of two definitions of a link the first counts, so that the links
/// between pages lead to modules here, and to files in the repository.
macro_rules! pages {
    ($($module:ident $file:literal)*) => {
        $(
            #[doc = include_str!("links.txt")]
            #[doc = include_str!($file)]
            pub mod $module {}
        )*
    };
}

pages! {
    training "training.md"
    engines "engines.md"
    costs "costs.md"
    glossary "glossary.md"
    layouts "layouts.md"
    layout_files "layout-files.md"
    meshes "meshes.md"
    values "values.md"
    quantizing "quantizing.md"
    formats "formats.md"
    sources "sources.md"
    runs "runs.md"
    reading "reading.md"
    python "python.md"
    semantics "semantics.md"
    operations "operations.md"
    serving "serving.md"
    doors "doors.md"
    clusters "clusters.md"
    performance "performance.md"
    troubleshooting "troubleshooting.md"
    comparison "comparison.md"
    changelog "changelog.md"
    security "security.md"
}
