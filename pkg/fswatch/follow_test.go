// SPDX-License-Identifier: Apache-2.0

package fswatch

import (
	"testing"
)

// TestFollowingADirectoryAndUp: "..", in what a link leads to, leads up from where the name before it leads.
func TestFollowingADirectoryAndUp(t *testing.T) {
	tr := &tree{T: t, root: t.TempDir()}
	tr.mkdir("dir")
	tr.mkdir("far/deep")
	tr.write("far/file")
	tr.write("dir/file")
	tr.link("../far/deep", "dir/link")
	tr.link("link/../file", "dir/conf")
	tr.start("dir")
	tr.notified("a write", func() { tr.write("far/file") })
	tr.notified("a directory elsewhere", func() { tr.mkdir("near/deep"); tr.relink("../near/deep", "dir/link") })
	tr.notified("a new file there", func() { tr.write("near/file") })
	tr.write("far/file")
	tr.quiet("where no link leads any more")
}

func TestFollowing(t *testing.T) {
	tr := &tree{T: t, root: t.TempDir()}
	tr.mkdir("dir")
	tr.mkdir("one")
	tr.write("one/file")
	tr.write("one/other")
	tr.link("../one/file", "dir/link")
	tr.link("loop", "dir/loop") // hides nothing
	tr.start("dir")

	tr.notified("a write in place", func() { tr.write("one/file") })
	tr.notified("a file put in its place", func() { tr.write("one/.new"); tr.rename("one/.new", "one/file") })
	tr.notified("the same again", func() { tr.write("one/.new"); tr.rename("one/.new", "one/file") })
	tr.write("one/other")
	tr.quiet("a file beside it")
	tr.notified("its removal", func() { tr.remove("one/file") })
	tr.notified("and that it is back", func() { tr.write("one/file") })
	tr.notified("its directory's way", func() { tr.rename("one", "gone") })
	tr.notified("a directory with it", func() { tr.mkdir("new"); tr.write("new/file"); tr.rename("new", "one") })
	tr.notified("what is in that", func() { tr.write("one/file") })

	tr.mkdir("two/dir")
	tr.write("two/file")
	tr.notified("a link elsewhere", func() { tr.relink("../two/file", "dir/link") })
	tr.notified("what that leads to", func() { tr.write("two/file") })
	tr.write("one/file")
	tr.quiet("what it led to")
	tr.notified("a file in the link's place", func() { tr.write("dir/.new"); tr.rename("dir/.new", "dir/link") })
	tr.write("two/file")
	tr.quiet("what no link leads to")
	tr.notified("a link in the file's place", func() { tr.relink("../two/file", "dir/link") })
	tr.notified("where that leads", func() { tr.write("two/file") })
	tr.notified("a link that comes", func() { tr.link("link", "dir/more"); tr.link("../one/file", "dir/third") })
	tr.notified("where the last of them leads", func() { tr.write("one/file") })
	tr.notified("a link to a directory", func() { tr.link("../two/dir", "dir/sub") })
	tr.write("two/dir/file")
	tr.quiet("a file in that")
	tr.notified("a file of the directory itself", func() { tr.write("dir/file") })
}
