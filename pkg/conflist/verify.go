// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// verify makes sure that the second text says what the first does, but for our
// entries, of which it has the given ones.
func verify(was, now []byte, entries ...[]byte) error {
	before, theirs, _, err := divide(was)
	if err != nil {
		return err
	}
	after, stillTheirs, nowOurs, err := divide(now)
	if err != nil {
		return fmt.Errorf("the outcome cannot be read: %w", err)
	}
	if !reflect.DeepEqual(before, after) || !reflect.DeepEqual(theirs, stillTheirs) {
		return errors.New("the outcome differs in more than our entry")
	}
	wanted := make([]any, len(entries))
	for i, entry := range entries {
		if wanted[i], err = decode(entry); err != nil {
			return err
		}
	}
	if !slices.EqualFunc(nowOurs, wanted, reflect.DeepEqual) {
		return errors.New("the outcome has another entry than the one to be added")
	}
	return nil
}

// divide parts a list's text into what stands around the plugins, the plugins of
// others, and our entries.
func divide(doc []byte) (around map[string]any, theirs, own []any, err error) {
	list, err := parseList(doc)
	if err != nil {
		return nil, nil, nil, err
	}
	all, err := decode(doc)
	if err != nil {
		return nil, nil, nil, err
	}
	around, _ = all.(map[string]any)
	plugins, _ := around["plugins"].([]any)
	delete(around, "plugins")
	if len(plugins) != len(list.plugins) {
		return nil, nil, nil, errors.New("plugins: is read in two ways")
	}
	mine := list.ours()
	for i, p := range plugins {
		if slices.Contains(mine, i) {
			own = append(own, p)
		} else {
			theirs = append(theirs, p)
		}
	}
	return around, theirs, own, nil
}

// decode keeps numbers as they are written.
func decode(doc []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("%w: %s", config.ErrNotJSON, policy.Printable(err.Error()))
	}
	return v, nil
}

// checkEntry refuses an entry that the plugin would refuse in that network: in a
// list it would fail every ADD.
func checkEntry(entry []byte, network, cniVersion string) error {
	if err := isText(entry); err != nil {
		return err
	}
	var values map[string]any
	if err := json.Unmarshal(entry, &values); err != nil {
		return errors.New("is not an object; write one, in braces")
	}
	if values["type"] != config.PluginType {
		return fmt.Errorf("type: must be %q", config.PluginType)
	}
	values["name"], values["cniVersion"] = network, cniVersion
	netconf, err := json.Marshal(values)
	if err != nil {
		return fmt.Errorf("encode: %s", policy.Printable(err.Error()))
	}
	_, err = config.ParseEntry(netconf)
	return err
}
