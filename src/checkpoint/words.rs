//! Enums whose choices are shown by words.

/// Enums of which each choice has its word beside it: `Display` writes that.
macro_rules! words {
    ($($(#[$meta:meta])* pub enum $name:ident { $($(#[$of:meta])* $choice:ident = $word:literal,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$of])* $choice,)* }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Self::$choice => $word,)* })
            }
        }
    )*};
}
pub(crate) use words;
