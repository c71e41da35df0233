// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// DefaultEntry is what is put into a conflist where nobody says what else.
const DefaultEntry = `{"type":"` + config.PluginType + `"}`

// ReadEntry reads the file of the entry to put into conflists. One that is not
// there means DefaultEntry. What the plugin would refuse in any network is an
// error, which names the file.
func ReadEntry(path string) ([]byte, error) {
	entry, err := readFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []byte(DefaultEntry), nil
	case err != nil:
		return nil, err
	}
	// What a network has beside the entry's own keys does not matter here.
	const network, cniVersion = "network", "1.0.0"
	if err := checkEntry(entry, network, cniVersion); err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	return entry, nil
}

// source is where the entry comes from. The last good one holds.
type source struct {
	from func() ([]byte, error)
	last []byte // nil until there was a good one
}

// read returns the entry to put in, nil where there has been no good one yet, and
// why it is not what the file says.
func (s *source) read() ([]byte, error) {
	entry, err := s.from()
	if err == nil {
		s.last = entry
		return entry, nil
	}
	if s.last == nil {
		return nil, fmt.Errorf("the entry to put in: %w; until then none is put in", err)
	}
	return s.last, fmt.Errorf("the entry to put in: %w; until then it is what the file said last", err)
}
