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
	// Entry is the last valid content of conflist.entry_file, or nil if there was none.
	Entry json.RawMessage `json:"entry,omitempty"`
	// Digests maps the path of a conflist to the digests of the plugin entries that ip-masq inserted into it, or
	// found there equal to the entry file. There are two digests while one entry replaces the other, and one
	// otherwise.
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
