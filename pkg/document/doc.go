// SPDX-License-Identifier: Apache-2.0

// Package document is the form in which a decoder hands over a text that is not
// JSON: its value as JSON, and where in the text each key stands.
//
// The decoders are packages below it, for what their libraries do when a program
// starts: every ADD of the plugin would pay for that. So config takes a Decoder,
// and only who reads such texts links one.
package document
