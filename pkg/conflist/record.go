// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// entryRecord is the file in the dataDir about the conflists that ip-masq has changed.
type entryRecord struct {
	// Entry is the last content of conflist.entry_file that was inserted or found in a conflist, nil if there
	// was none.
	Entry json.RawMessage `json:"entry,omitempty"`
	// Digests maps the path of a conflist to the digests of the plugin entries that ip-masq inserted into it,
	// or found there equal to the entry file: two while one entry replaces the other, and one otherwise.
	Digests map[string][]string `json:"digests,omitempty"`
	// Generated maps the path of a list that ip-masq generated to the digest of its value without the plugin
	// entry.
	Generated map[string]string `json:"generated,omitempty"`
}

// readEntryRecord returns an empty record if the file is missing or damaged; it is written again.
func readEntryRecord(path string) entryRecord {
	var r entryRecord
	doc, _, err := safefile.ReadFile(path, maxSize)
	if err != nil || json.Unmarshal(doc, &r) != nil {
		return entryRecord{}
	}
	return r
}

// valuesOf returns the values of the keys of an entry in a form without order and space.
func valuesOf(entry []byte) map[string]string {
	members, values := map[string]any{}, map[string]string{}
	_ = json.Unmarshal(entry, &members) // no valid entry has no values
	for key, value := range members {
		text, _ := json.Marshal(value) // Unmarshal made it
		values[key] = string(text)
	}
	return values
}

func differences(a, b []byte) []string { return config.Differences(valuesOf(a), valuesOf(b)) }

func digestOf(entry []byte) string {
	text, _ := json.Marshal(valuesOf(entry)) // sorts the keys
	return config.DigestOf(text)
}

// wroteEntry reports whether ip-masq wrote the network's plugin entry as it is. One without a record, such as
// of an earlier version, is ip-masq's if the backup is the file without it.
func (e Editor) wroteEntry(n Network, record entryRecord) bool {
	if digests, known := record.Digests[n.Path]; known {
		return slices.Contains(digests, digestOf(n.entryText()))
	}
	if n.Generated { // as a whole
		return true
	}
	if e.Backups == nil { // nothing to compare with
		return false
	}
	dir, errDir := e.Backups()
	without, err := setEntry(n.Path, n.Conflist.Doc, nil, false)
	return cmp.Or(errDir, err) == nil && checkUnchanged(backupPath(dir, n.Path), without) == nil
}

// recordEntries records these entries as ip-masq's in the file of a network, if there are any, and a list
// that ip-masq generated as such, if that changes anything. It forgets files that are gone.
func (e Editor) recordEntries(ctx context.Context, n Network, entries ...[]byte) error {
	return e.record(ctx, "record the plugin entry", e.RecordPath, func(d *safefile.Dir, name string) error {
		r := readEntryRecord(e.RecordPath)
		before, _ := json.Marshal(r)
		r.setEntries(n.Path, entries)
		if n.Generated {
			r.setGenerated(n.Conflist)
		}
		if e.FromFile && len(entries) > 0 {
			r.Entry = bytes.TrimSpace(entries[len(entries)-1])
		}
		r.forgetMissing()
		now, err := json.Marshal(r)
		if err != nil || bytes.Equal(before, now) {
			return err
		}
		return writeRecord(d, name, now)
	})
}

// setEntries makes these entries, if there are any, ip-masq's in a file.
func (r *entryRecord) setEntries(path string, entries [][]byte) {
	if len(entries) == 0 {
		return
	}
	var digests []string
	for _, entry := range entries {
		digests = append(digests, digestOf(entry))
	}
	if r.Digests == nil {
		r.Digests = map[string][]string{}
	}
	r.Digests[path] = digests
}

func (r *entryRecord) setGenerated(list config.Conflist) {
	if r.Generated == nil {
		r.Generated = map[string]string{}
	}
	r.Generated[list.File] = generatedDigest(list)
}

// forgetMissing removes the files that are gone.
func (r *entryRecord) forgetMissing() {
	for path := range r.Digests {
		if safefile.IsMissing(path) {
			delete(r.Digests, path)
		}
	}
	for path := range r.Generated {
		if safefile.IsMissing(path) {
			delete(r.Generated, path)
		}
	}
}

// record calls change with the locked dataDir, which it creates, and the name of a file there; path is "" for
// none.
func (e Editor) record(
	ctx context.Context, op, path string, change func(d *safefile.Dir, name string) error,
) error {
	if path == "" {
		return nil
	}
	_, err := e.Backups() // creates the dataDir
	if err == nil {
		err = inDir(ctx, path, change)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

func writeRecord(d *safefile.Dir, name string, text []byte) error {
	temp, err := d.Stage(append(text, '\n'), nil)
	if err != nil {
		return err
	}
	return errors.Join(d.Rename(temp, name), d.Sync())
}
