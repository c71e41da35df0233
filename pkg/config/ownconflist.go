// SPDX-License-Identifier: Apache-2.0

package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// OwnConflist is ip-masq's own conflist: a copy of the main CNI plugin's file with the plugin entry.
type OwnConflist struct {
	File    string `json:"file"` // the path of the copy
	Main    string `json:"main"` // the path of the file that was copied
	Network string `json:"network"`
	Digest  string `json:"digest"` // of the file that was copied; "" until the copy is written
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
	var next *Conflist
	for i, l := range dir.Conflists {
		switch {
		case l.File == o.File:
			there = true
			continue
		case there && next == nil && !slices.Equal(l.Types, []string{"loopback"}):
			next = &dir.Conflists[i]
		}
		mainThere = mainThere || l.File == o.Main || l.Network == o.Network
	}
	stale := func(format string, args ...any) error {
		return fmt.Errorf("%s is a copy of %s, "+format, append([]any{policy.Printable(o.File), policy.Printable(o.Main)}, args...)...)
	}
	switch {
	case !there, next != nil && next.File == o.Main && DigestOf(next.Doc) == o.Digest:
		return nil
	case !mainThere:
		return stale("%w", ErrMainGone)
	case next != nil && next.File != o.Main:
		return stale("and the main CNI plugin's file is %s now", policy.Printable(filepath.Base(next.File)))
	case next == nil:
		return stale("and the main CNI plugin's file has another name now")
	}
	return stale("which has changed since")
}

// ReadOwnConflist reads the record of ip-masq's own conflist. It returns nil if the file is missing or damaged; the
// reconciler writes a damaged file again.
func ReadOwnConflist(path string) *OwnConflist {
	if safefile.IsMissing(path) { // as for nearly every ADD
		return nil
	}
	var own OwnConflist
	doc, _, err := safefile.ReadFile(path, maxConfSize)
	if err != nil || json.Unmarshal(doc, &own) != nil {
		return nil
	}
	return &own
}
