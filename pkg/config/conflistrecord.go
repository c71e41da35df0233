// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// ConflistRecord is the file in the dataDir about the conflists that ip-masq has changed.
type ConflistRecord struct {
	// Entry is the content of conflist.entry_file that was valid last; nil if there was never one.
	Entry json.RawMessage `json:"entry,omitempty"`
	// Digests has, by the path of a conflist, the digests of plugin entries in it that ip-masq has inserted, or found
	// equal to the entry file: one, and two while one replaces the other.
	Digests map[string][]string `json:"digests,omitempty"`
}

// ReadConflistRecord reads the record. Without the file it is empty.
func ReadConflistRecord(path string) (r ConflistRecord, err error) {
	doc, _, err := safefile.ReadFile(path, maxConfSize)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		if err = json.Unmarshal(doc, &r); err != nil {
			err = fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
	}
	return r, err
}
