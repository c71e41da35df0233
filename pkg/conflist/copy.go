// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// copyRecord is the record of the copy that an earlier version made: it kept the plugin entry in a copy of
// the main CNI plugin's file, which the runtime found first. The copy never ended well beside other programs
// that write conflists, so it is removed once the entry is in the main CNI plugin's file. A copy that another
// program has changed since is not only ip-masq's: it stays, and a finding names it.
type copyRecord struct {
	File   string `json:"file"`   // the path of the copy
	Main   string `json:"main"`   // the path of the file that was copied
	Digest string `json:"digest"` // of the file that was copied
}

// readCopyRecord returns an empty record, which is that of no copy, if the file is missing or damaged.
func readCopyRecord(path string) copyRecord {
	var r copyRecord
	if safefile.IsMissing(path) {
		return r
	}
	doc, _, err := safefile.ReadFile(path, maxSize)
	if err != nil || json.Unmarshal(doc, &r) != nil {
		return copyRecord{}
	}
	return r
}

// isCopy reports whether a file is the copy on record, and as the earlier version wrote it.
func (r copyRecord) isCopy(list config.Conflist) bool {
	if !r.names(list) || list.Err != nil {
		return false
	}
	without, err := setEntry(list.File, list.Doc, nil, false)
	if err != nil {
		return false
	}
	isText := r.isOriginal(without) || r.isOriginal(list.Doc)
	return isText || r.hasOriginalPlugin(list) || r.isMainWithoutEntry(without)
}

// hasOriginalPlugin reports whether the list has the text of the .conf file that was copied as its only other
// plugin.
func (r copyRecord) hasOriginalPlugin(list config.Conflist) bool {
	isSingle := len(list.Types) == len(list.Entries)+1
	if !isSingle {
		return false
	}
	plugin := list.Plugins[0]
	asFile := append(slices.Clip(plugin), '\n')
	return r.isOriginal(plugin) || r.isOriginal(asFile)
}

// isMainWithoutEntry reports whether a text is that of the file that was copied, but for the entry of that
// file.
func (r copyRecord) isMainWithoutEntry(text []byte) bool {
	main, _, err := safefile.ReadFile(r.Main, maxSize)
	if err != nil || !r.isOriginal(main) {
		return false
	}
	mainWithout, err := setEntry(r.Main, main, nil, false)
	return err == nil && bytes.Equal(text, mainWithout)
}

// names reports whether a file is the one on record, by its name. An administrator may have another one of
// that name.
func (r copyRecord) names(list config.Conflist) bool {
	base := filepath.Base(list.File)
	isName := base == "05-ip-masq.conflist" || base == "00-ip-masq.conflist"
	return isName && list.File == r.File
}

func (r copyRecord) isOriginal(text []byte) bool { return config.DigestOf(text) == r.Digest }

// find returns the file on record, and whether it is there.
func (r copyRecord) find(lists []config.Conflist) (list config.Conflist, isThere bool) {
	i := slices.IndexFunc(lists, r.names)
	if i < 0 {
		return config.Conflist{}, false
	}
	return lists[i], true
}

// isReplaceable reports whether the runtime finds a network in the files without the copy.
func (r copyRecord) isReplaceable(lists []config.Conflist) bool {
	_, err := pickFirst(slices.DeleteFunc(slices.Clone(lists), r.names))
	return err == nil
}

// removeCopy removes the copy that an earlier version made, and returns its path, "" if there is none. A copy
// to which Multus delegates stays until Multus does so no more.
func (e Editor) removeCopy(ctx context.Context) (path string, err error) {
	record := readCopyRecord(e.CopyRecord)
	if record.File == "" {
		return "", nil
	}
	dir, err := config.ReadConfDir(e.Dir)
	if err != nil {
		return "", err
	}
	list, isThere := record.find(dir.Conflists)
	if isThere {
		isUsed := slices.Contains(MultusFiles(e.Dir), filepath.Base(list.File))
		if isUsed || !record.isCopy(list) {
			return "", nil
		}
		c, err := e.write(ctx, Change{Path: list.File}, list.File, list.Doc, nil)
		if err != nil {
			return "", err
		}
		path = c.Path
	}
	forget := func(d *safefile.Dir, name string) error { return errors.Join(d.Remove(name), d.Sync()) }
	return path, e.record(ctx, "forget the copy of a conflist", e.CopyRecord, forget)
}

// CopyFinding returns the finding about the copy that an earlier version made, or nil if there is none.
func (e Editor) CopyFinding() *Finding {
	record := readCopyRecord(e.CopyRecord)
	if record.File == "" {
		return nil
	}
	dir, err := config.ReadConfDir(e.Dir)
	if err != nil {
		return nil
	}
	list, isThere := record.find(dir.Conflists)
	if !isThere {
		return nil
	}
	text := fmt.Sprintf("%s is a copy of %s that an earlier version of ip-masq made",
		policy.Printable(record.File), policy.Printable(record.Main))
	if !record.isCopy(list) {
		text += ", and another program has changed the copy since"
	}
	return &Finding{ConflistCopy, text}
}
