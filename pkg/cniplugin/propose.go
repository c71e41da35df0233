// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"errors"
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// propose puts the network's statement among the documents.
func (n *node) propose(s store.State, own policy.Source) (*enforce.Proposal, error) {
	p := enforce.NewProposal(s.Sources)
	return p, p.Add(own, n.disk, n.Warn)
}

// conflists is the conf directory of the runtimes, read when first asked for:
// an ADD whose document stands does without it.
type conflists struct {
	dir  string
	warn func(error)
	read *config.ConfDir
	err  error
}

func (c *conflists) load() config.ConfDir {
	if c.read == nil {
		dir, err := config.ReadConfDir(c.dir)
		if !errors.Is(err, os.ErrNotExist) {
			c.warn(err)
		}
		c.read, c.err = &dir, err
	}
	return *c.read
}

// Names implements enforce.Conflists.
func (c *conflists) Names(network string) bool { return c.load().Names(network) }

// Lacks implements enforce.Conflists.
func (c *conflists) Lacks(network string) bool { return c.load().Lacks(network) }

// Has implements enforce.Conflists.
func (c *conflists) Has(network string, s policy.SourcePolicy) bool { return c.load().Has(network, s) }
