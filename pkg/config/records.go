// SPDX-License-Identifier: Apache-2.0

package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// ConflistRecord is the file in the dataDir about the conflists that ip-masq has changed.
type ConflistRecord struct {
	// Entry is the last valid content of conflist.entry_file, or nil if there was none.
	Entry json.RawMessage `json:"entry,omitempty"`
	// Digests maps the path of a conflist to the digests of the plugin entries that ip-masq inserted into it, or
	// found there equal to the entry file: two while one entry replaces the other, and one otherwise.
	Digests map[string][]string `json:"digests,omitempty"`
}

// ReadConflistRecord reads the record. Without the file it is empty.
func ReadConflistRecord(path string) (r ConflistRecord, err error) {
	if err = readRecord(path, &r); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return r, err
}

func readRecord(path string, to any) error {
	doc, _, err := safefile.ReadFile(path, maxConfSize)
	if err == nil {
		if err = json.Unmarshal(doc, to); err != nil {
			err = fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
	}
	return err
}

// OwnConflist is the record of ip-masq's own conflist: a copy of the main CNI plugin's file with the plugin entry.
type OwnConflist struct {
	File    string `json:"file"` // the path of the copy
	Main    string `json:"main"` // the path of the file that was copied
	Network string `json:"network"`
	Digest  string `json:"digest"` // of the file that was copied; "" until the copy is written
}

// ReadOwnConflist returns nil if the file is missing or damaged; the reconciler writes a damaged file again.
func ReadOwnConflist(path string) *OwnConflist {
	var own OwnConflist
	if safefile.IsMissing(path) || readRecord(path, &own) != nil { // missing for nearly every ADD
		return nil
	}
	return &own
}

// ErrMainGone reports that the main CNI plugin's file, of which ip-masq has a copy, is gone.
var ErrMainGone = errors.New("which is gone")

// DigestOf returns the digest of the text of a main CNI plugin's file.
func DigestOf(doc []byte) string {
	sum := sha256.Sum256(doc)
	return hex.EncodeToString(sum[:])
}

// Stale returns why the copy does not match the main CNI plugin's file, or nil. That file is the next one in the
// directory. The error is an ErrMainGone if no other file has the network.
func (o *OwnConflist) Stale(dir ConfDir) error {
	if o == nil {
		return nil
	}
	var there, mainThere bool
	var next Conflist
	for _, l := range dir.Conflists {
		switch {
		case l.File == o.File:
			there = true
			continue
		case there && next.File == "" && !slices.Equal(l.Types, []string{"loopback"}):
			next = l
		}
		mainThere = mainThere || l.File == o.Main || l.Network == o.Network
	}
	isNext := next.File == o.Main
	if !there || isNext && DigestOf(next.Doc) == o.Digest {
		return nil
	}
	err := errors.New("which has changed since")
	switch {
	case !mainThere:
		err = ErrMainGone
	case next.File == "":
		err = errors.New("and the main CNI plugin's file has another name now")
	case !isNext:
		err = fmt.Errorf("and the main CNI plugin's file is %s now", policy.Printable(filepath.Base(next.File)))
	}
	return fmt.Errorf("%s is a copy of %s, %w", policy.Printable(o.File), policy.Printable(o.Main), err)
}
