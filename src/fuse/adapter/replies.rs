//! The replies of fuser, as the service answers them.

use ckfs_service::Refuse;
use ckfs_volume::Ino;
use fuser::{
    Errno, INodeNo, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};

pub(super) fn ino(ino: INodeNo) -> Ino {
    Ino(ino.0)
}

/// A reply of fuser.
#[derive(Debug)]
pub(super) struct Reply<R>(pub(super) R);

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for Reply<$reply> {
            fn refuse(self, errno: i32) {
                self.0.error(Errno::from_i32(errno));
            }
        })*
    };
}

refuse!(
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEmpty,
    ReplyEntry,
    ReplyOpen,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr
);
