// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"
)

// addOutput gives a command the flag -o.
func (a *app) addOutput(c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&a.output, "output", "o", "text", "`FORMAT` of the output: text or json")
	run := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if a.output != "text" && a.output != "json" {
			return usageError{fmt.Errorf("-o %q: write text or json", a.output)}
		}
		return run(c, args)
	}
	return c
}

func (a *app) json() bool { return a.output == "json" }

// print writes an answer as JSON, indented for people.
func (a *app) print(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
