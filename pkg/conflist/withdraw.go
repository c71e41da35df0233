// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// errInFolder says that libcni reads an entry of ours from where we write none.
var errInFolder = errors.New("the folder of the network's name has our entry too; remove its file")

// Withdraw takes our entries out of the network, or, where none is named, out of
// every network of the directory, and removes the lists that were made of single
// plugins' configurations; but one whose original is gone stays, without our
// entries, where it is all the network that the directory has. It goes on where a
// file fails, and returns what was changed beside the errors: what cannot be read
// may have an entry. A directory that is missing has none.
func (p Place) Withdraw() ([]Change, error) {
	dir, err := config.ReadConfDir(p.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	}
	ctx := context.Background()
	var changes []Change
	var errs []error
	for _, list := range dir.Conflists {
		if p.Network != "" && list.Network != "" && list.Network != p.Network {
			continue
		}
		c, err := insist(func() (Change, error) { return p.withdraw(ctx, list) })
		if c.Wrote {
			changes = append(changes, c)
		}
		errs = append(errs, err)
	}
	return changes, errors.Join(errs...)
}

// withdraw takes our entries out of one file.
func (p Place) withdraw(ctx context.Context, listed config.Conflist) (Change, error) {
	path := listed.File
	c := Change{Path: path}
	doc, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = absent(path, ErrChanged); err == nil {
			return c, nil
		}
	}
	if err != nil {
		return c, err
	}
	if !isListFile(path) {
		conf, err := parseSingle(doc)
		switch {
		case err != nil && !mentions(doc):
			return c, nil // broken, and nothing of ours
		case err == nil && conf.Type == config.PluginType:
			err = ErrOnlyPlugin
		}
		return c, about(path, err)
	}
	list, err := parseList(doc)
	if err != nil {
		if !mentions(doc) {
			return c, nil
		}
		return c, about(path, fmt.Errorf("%w, and it may have our entry; mend or remove it: %w", ErrBroken, err))
	}
	c.Network = list.name
	if isMade(path, list) {
		if c.Stays, err = p.needs(path); err != nil {
			return c, err
		}
		if c.Stays == "" {
			return p.write(ctx, c, doc, nil)
		}
	}
	now, _, err := Remove(doc)
	if err != nil {
		return c, about(path, err)
	}
	if c, err = p.write(ctx, c, doc, now); err == nil && len(listed.Entries) > len(list.ours()) {
		err = about(path, errInFolder)
	}
	return c, err
}

// needs returns why pods may need a made list: Multus delegates to it, or it is all
// the network that the directory has. It returns "" where they do not.
func (p Place) needs(made string) (string, error) {
	if slices.Contains(p.Keep, filepath.Base(made)) {
		return "Multus delegates to it; restart Multus, and uninstall once more to remove it", nil
	}
	if original(made) != "" {
		return "", nil
	}
	dir, err := config.ReadConfDir(p.Dir)
	if err != nil {
		return "", err
	}
	for _, list := range dir.Conflists {
		if list.File == made || list.Err != nil {
			continue
		}
		if n, err := load(list); err == nil && n.Name != "" {
			return "", nil
		}
	}
	return "no other file there has a network; the configuration that it was made of is gone, so remove it once there is one", nil
}

// mentions reports whether a text that cannot be read may have an entry of ours.
func mentions(doc []byte) bool { return strings.Contains(string(doc), `"`+config.PluginType+`"`) }

func about(path string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", policy.Printable(path), err)
}
